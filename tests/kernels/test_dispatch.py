"""The chooser and the format table."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from llama_cpp import llama_cpp

import towerd.kernels
from towerd.kernels import dispatch
from towerd.kernels.formats import BY_NAME, BY_TYPE, FORMATS


def test_default_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable the C++ is used where it is built."""
    monkeypatch.delenv("TOWERD_KERNELS", raising=False)
    assert dispatch.name() == "native"


@pytest.mark.parametrize("value", ["Native", "cuda", " "])
def test_unknown_choice_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """A misspelt choice never falls back silently."""
    monkeypatch.setenv("TOWERD_KERNELS", value)
    with pytest.raises(ValueError, match="expected reference or native"):
        dispatch.gather_rows(
            np.zeros((1, 1), np.uint8), np.zeros(1, np.int64), np.zeros((1, 1), np.uint8)
        )


def test_package_imports_nothing() -> None:
    """`transformers` reads the version of any top-level package called kernels."""
    assert towerd.kernels.__version__.count(".") == 2


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
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
