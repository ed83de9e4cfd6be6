"""How properties draw their examples: the same ones at every run of the suite, new ones under `make fuzz`.
And no test sees the models in the user's directory unless it asks real_models for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import real_models  # noqa: F401  # looks where the user's models are before they are moved away
from hypothesis import HealthCheck, settings

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A slow machine is no failure."""

settings.register_profile("settled", UNTIMED, derandomize=True, database=None)
settings.register_profile("explore", UNTIMED, derandomize=False, print_blob=True)
settings.load_profile("settled")


@pytest.fixture(scope="session", autouse=True)
def _no_models_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The default model is the bundled one in every test, whatever the user fetched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield
