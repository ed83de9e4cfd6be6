"""ggml's own conversions of rows, called in the libraries that llama-cpp-python ships."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_FROM_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _Traits(ctypes.Structure):
    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_elements", ctypes.c_int64),
        ("block_interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", _TO_FLOAT),
        ("from_float_ref", _FROM_FLOAT),
    )


class _CpuTraits(ctypes.Structure):
    _fields_ = (("from_float", _FROM_FLOAT),)


@functools.cache
def _libraries() -> tuple[Any, Any]:
    folder = Path(llama_cpp.__file__).parent / "lib"
    base = ctypes.CDLL(str(next(folder.glob("libggml-base.*"))))
    cpu = ctypes.CDLL(str(next(folder.glob("libggml-cpu.*"))))
    base.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_CpuTraits)
    cpu.ggml_cpu_init()
    return base, cpu


def decode(ggml_type: int, rows: Bytes) -> Floats:
    """float32[n, elements] of uint8[n, row_bytes]."""
    traits = _libraries()[0].ggml_get_type_traits(ggml_type).contents
    rows = np.ascontiguousarray(rows)
    n_elements = rows.shape[1] // traits.block_bytes * traits.block_elements
    values = np.zeros((len(rows), n_elements), np.float32)
    traits.to_float(rows.ctypes.data, values.ctypes.data, values.size)
    return values


def encode(ggml_type: int, values: Floats) -> Bytes:
    """uint8[n, row_bytes] as the CPU backend writes its cache."""
    base, cpu = _libraries()
    traits = base.ggml_get_type_traits(ggml_type).contents
    values = np.ascontiguousarray(values)
    row_bytes = values.shape[1] // traits.block_elements * traits.block_bytes
    rows = np.zeros((len(values), row_bytes), np.uint8)
    write = cpu.ggml_get_type_traits_cpu(ggml_type).contents.from_float
    for i in range(len(values)):
        write(values[i].ctypes.data, rows[i].ctypes.data, values.shape[1])
    return rows
