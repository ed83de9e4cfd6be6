"""Every kernel test runs on each instruction set of this machine and on the reference."""

from __future__ import annotations

import pytest

from towerd.kernels import dispatch


@pytest.fixture(params=[name for name in dispatch.available() if name != "metal"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces one implementation for the test; its name. A GPU rounds differently and has its own
    tests."""
    monkeypatch.setenv("TOWERD_KERNELS", request.param)
    assert dispatch.name() == request.param
    return str(request.param)
