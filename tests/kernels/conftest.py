"""Every kernel test runs on each instruction set of this machine; those of MLX
on its operations and on the Metal text."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import pytest

from towerd.kernels import dispatch


@pytest.fixture(params=[name for name in dispatch.available() if name != "metal"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces one implementation for the test; its name. A GPU rounds differently and has its own
    tests."""
    monkeypatch.setenv("TOWERD_KERNELS", request.param)
    assert dispatch.name() == request.param
    return str(request.param)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compiles each Metal kernel once for all tests of a file."""
    metal_on_cpu = pytest.importorskip("metal_on_cpu")
    return metal_on_cpu.MetalOnCpu(tmp_path_factory.mktemp("metal"))


@pytest.fixture(params=["ops", "metal"])
def backend(request: pytest.FixtureRequest, compiler: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way the public functions of MLX's kernels go during the test."""
    mx: Any = pytest.importorskip("mlx.core")
    kernels: Any = pytest.importorskip("towerd.kernels.mlx.kernels")
    metal: Any = pytest.importorskip("towerd.kernels.mlx.metal")
    metal.kernel.cache_clear()
    if request.param == "ops":
        monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    elif not mx.metal.is_available():
        if sys.platform == "darwin" or shutil.which("c++") is None:
            pytest.skip("needs an Apple GPU, or Linux with a C++ compiler")
        compiler.install(monkeypatch)
    assert kernels.available() == (request.param == "metal")
    return str(request.param)
