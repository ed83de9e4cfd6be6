"""ggml's own row routines, called through ctypes, to compare the kernels with."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from towerd.errors import TowerdError
from towerd.kernels.formats import BY_NAME

_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _Traits(ctypes.Structure):
    """`struct ggml_type_traits` (ggml.h)."""


_Traits._fields_ = [
    ("type_name", ctypes.c_char_p),
    ("blck_size", ctypes.c_int64),
    ("blck_size_interleave", ctypes.c_int64),
    ("type_size", ctypes.c_size_t),
    ("is_quantized", ctypes.c_bool),
    ("to_float", _TO_FLOAT),
    ("from_float_ref", _TO_FLOAT),
]


class _CpuTraits(ctypes.Structure):
    """The first field of `struct ggml_type_traits_cpu` (ggml-cpu.h)."""


_CpuTraits._fields_ = [("from_float", _TO_FLOAT)]


class Ggml:
    """The libraries of llama-cpp-python. Raises TowerdError if they are missing."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise TowerdError("llama-cpp-python is not installed; run `make setup`.")
        folder = Path(spec.origin).parent / "lib"
        suffix = "dylib" if sys.platform == "darwin" else "so"
        try:
            self._base: Any = ctypes.CDLL(
                str(folder / f"libggml-base.{suffix}"), ctypes.RTLD_GLOBAL
            )
            self._cpu: Any = ctypes.CDLL(str(folder / f"libggml-cpu.{suffix}"))
        except OSError as error:
            raise TowerdError(f"ggml's libraries cannot be loaded: {error}.") from error
        self._base.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
        self._cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_CpuTraits)
        self._cpu.ggml_cpu_init()

    def encode(
        self, name: str, values: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]
    ) -> None:
        """float32[n, d] to rows of a cache type, as llama.cpp's CPU cache writes them."""
        traits = self._cpu.ggml_get_type_traits_cpu(BY_NAME[name].ggml_type).contents
        traits.from_float(values.ctypes.data, out.ctypes.data, values.size)

    def decode(self, name: str, rows: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
        """Rows of a cache type to float32."""
        traits = self._base.ggml_get_type_traits(BY_NAME[name].ggml_type).contents
        traits.to_float(rows.ctypes.data, out.ctypes.data, out.size // 4)
