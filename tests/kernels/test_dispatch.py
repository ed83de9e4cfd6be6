"""The chooser and the format table."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from llama_cpp import llama_cpp

import towerd.kernels
from towerd.kernels import _native, dispatch
from towerd.kernels.formats import BY_NAME, BY_TYPE, CACHE_FORMATS


def test_default_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable the C++ for this machine's instructions is used."""
    monkeypatch.delenv("TOWERD_KERNELS", raising=False)
    names = [name for name in dispatch.available() if name != "metal"]
    assert dispatch.name() == names[0] == _native.available()[0]
    assert names[-1] == "generic"
    assert set(names) < set(dispatch.CHOICES)


@pytest.mark.parametrize("value", ["Generic", "native", "cuda", " ", "avx512 "])
def test_unknown_choice_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """A misspelt choice never falls back silently."""
    monkeypatch.setenv("TOWERD_KERNELS", value)
    with pytest.raises(ValueError, match=f"TOWERD_KERNELS={value}: expected one of generic, "):
        dispatch.copy_planes(np.zeros(1, np.uint8), [])


@pytest.mark.parametrize("value", dispatch.CHOICES)
def test_choice_of_another_machine_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """An available choice is used, any other is refused; there is no fallback."""
    monkeypatch.setenv("TOWERD_KERNELS", value)
    if value in dispatch.available():
        assert dispatch.name() == value
        return
    with pytest.raises(ValueError, match=f"TOWERD_KERNELS={value}: (not on this|needs )"):
        dispatch.name()
    if value != "metal":
        with pytest.raises(ValueError, match=f"name: no kernels called {value}"):
            _native.Kernels(value)


def test_metal_without_mlx_says_how_to_get_it() -> None:
    """MLX is an extra: the default is C++ whether it is there or not."""
    program = "import sys; sys.modules['mlx'] = None\n"
    program += "from towerd.kernels import dispatch; print(dispatch.name())"

    def run(choice: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"TOWERD_KERNELS": choice}
        return subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
        )

    assert run("").stdout.strip() == _native.available()[0]
    said = run("metal").stderr.splitlines()[-1]
    assert said == (
        "ValueError: TOWERD_KERNELS=metal: needs mlx, which is not installed "
        "(on Apple Silicon: pip install 'towerd[mlx]')"
    )


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux tells what a CPU can do")
def test_available_is_what_the_cpu_has() -> None:
    """The C++ asks the CPU; the kernel's list of flags says the same."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    required = {
        "avx512": {"avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
        "avx2": {"avx2", "f16c", "fma"},
        "neon": {"asimd"},
    }
    has = [name for name, needs in required.items() if needs <= flags]
    assert _native.available() == [*has, "generic"]


def test_package_imports_nothing() -> None:
    """`transformers` reads the version of any top-level package called kernels."""
    assert towerd.kernels.__version__.count(".") == 2


@pytest.mark.parametrize("row", CACHE_FORMATS, ids=lambda row: row.name)
def test_formats_are_ggmls(row: towerd.kernels.formats.Format) -> None:
    """Ids and sizes agree with the gguf package and with the loaded libggml."""
    assert GGMLQuantizationType[row.name.upper()] == row.ggml_type
    assert GGML_QUANT_SIZES[GGMLQuantizationType(row.ggml_type)] == (
        row.block_elements,
        row.block_bytes,
    )
    assert (BY_TYPE[row.ggml_type], BY_NAME[row.name]) == (row, row)
    n = 4 * row.block_elements
    assert row.row_bytes(n) == 4 * row.block_bytes
    assert row.n_elements(row.row_bytes(n)) == n
    assert row.is_quantized == (row.block_elements == 32)
    for bad in (0, -n, *([n + 1] if row.is_quantized else [])):
        with pytest.raises(ValueError, match="n_elements"):
            row.row_bytes(bad)
    with pytest.raises(ValueError, match="row_bytes"):
        row.n_elements(row.block_bytes + 1)
    row_size = ctypes.CDLL(llama_cpp._lib._name).ggml_row_size
    row_size.restype, row_size.argtypes = ctypes.c_size_t, [ctypes.c_int, ctypes.c_int64]
    assert row_size(row.ggml_type, n) == row.row_bytes(n)
