"""How properties draw their examples: the same ones at every run of the suite, new ones under `make fuzz`.
Which tests are slow. And no test sees the models in the user's directory unless it asks real_models for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import real_models  # noqa: F401  # looks where the user's models are before they are moved away
from hypothesis import HealthCheck, settings

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A slow machine is no failure."""

settings.register_profile("settled", UNTIMED, derandomize=True, database=None)
settings.register_profile("explore", UNTIMED, derandomize=False, print_blob=True)
settings.load_profile("settled")

TESTS = Path(__file__).parent
SLOW = (
    *("agents", "cli", "e2e", "lab", "real", "sidecar"),
    *("codec/test_codec_exact.py", "cold/test_cold_kill.py", "engine/test_calibrate.py"),
    *(
        "engine/test_every_arch.py",
        "engine/test_operations.py",
        "kernels/test_block_codes.py",
        "kernels/test_block_fuzz.py",
    ),
    "connectors/test_vllm_engine.py",
    *("kernels/test_mlx_kernels.py", "kernels/test_mlx_rope_shift.py", "slots/test_hostile.py"),
    *(
        "store/test_recovery_crash.py",
        "router/test_router_llama.py",
        "router/test_router_serving.py",
    ),
)
"""Folders and files that take three quarters of the suite's time, most of them with programs that they start."""


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests."""
    slow = [TESTS / name for name in SLOW]
    for item in items:
        if any(item.path.is_relative_to(path) for path in slow):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _no_models_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The default model is the bundled one in every test, whatever the user fetched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield
