"""How properties draw their examples: the same ones at every run of the suite, new ones under `make fuzz`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A slow machine is no failure."""

settings.register_profile("settled", UNTIMED, derandomize=True, database=None)
settings.register_profile("explore", UNTIMED, derandomize=False, print_blob=True)
settings.load_profile("settled")
