"""Every kernel test runs on the C++ and on the reference."""

from __future__ import annotations

import pytest

from towerd.kernels import dispatch


@pytest.fixture(params=["native", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces one implementation for the test; its name."""
    monkeypatch.setenv("TOWERD_KERNELS", request.param)
    assert dispatch.name() == request.param
    return str(request.param)
