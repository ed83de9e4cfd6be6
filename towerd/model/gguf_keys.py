"""GgufKeys: metadata and small tensors of a GGUF, read by ggml's own parser.

The gguf package takes more than ten seconds for a vocabulary of 150,000 tokens, ggml a tenth of a
second. llama.cpp's model API gives no access to arrays and tensors.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from towerd.errors import ModelError
from towerd.llama_library import lib
from towerd.model.llama_log import demoted_log, route_log

_SCALARS: dict[int, str] = {
    **dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))),
    **dict(enumerate(("<u8", "<i8", "<f8"), 10)),
}
"""gguf's types of fixed size, as numpy names them."""
_STRING, _ARRAY = 8, 9
_F32 = 0
COUNT_MAX = 2**31 - 1


class _Params(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(lib._lib, name)
    function.restype, function.argtypes = result, arguments
    return function


_P, _ID, _NAME = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
_open = _function("gguf_init_from_file", _P, _NAME, _Params)
_free = _function("gguf_free", None, _P)
_find_key = _function("gguf_find_key", _ID, _P, _NAME)
_kv_type = _function("gguf_get_kv_type", ctypes.c_int, _P, _ID)
_val_data = _function("gguf_get_val_data", _P, _P, _ID)
_val_str = _function("gguf_get_val_str", _NAME, _P, _ID)
_arr_type = _function("gguf_get_arr_type", ctypes.c_int, _P, _ID)
_arr_n = _function("gguf_get_arr_n", ctypes.c_size_t, _P, _ID)
_arr_str = _function("gguf_get_arr_str", _NAME, _P, _ID, ctypes.c_size_t)
_arr_data = _function("gguf_get_arr_data", _P, _P, _ID)
_find_tensor = _function("gguf_find_tensor", _ID, _P, _NAME)
_n_tensors = _function("gguf_get_n_tensors", _ID, _P)
_tensor_type = _function("gguf_get_tensor_type", ctypes.c_int, _P, _ID)
_tensor_size = _function("gguf_get_tensor_size", ctypes.c_size_t, _P, _ID)
_tensor_offset = _function("gguf_get_tensor_offset", ctypes.c_size_t, _P, _ID)
_data_offset = _function("gguf_get_data_offset", ctypes.c_size_t, _P)


class GgufKeys:
    """An open GGUF header. Raises ValueError if ggml cannot read the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        route_log()
        with demoted_log():
            self.ptr: Any = _open(os.fsencode(path), _Params(True, None))
        if not self.ptr:
            raise ValueError(f"{path} is not a readable GGUF")

    def close(self) -> None:
        if self.ptr:
            _free(self.ptr)
            self.ptr = None

    @property
    def n_tensors(self) -> int:
        return int(_n_tensors(self.ptr))

    def shortage(self) -> str:
        """What is said of a file that lacks bytes of its tensors; empty for a whole one."""
        ends = [
            _tensor_offset(self.ptr, i) + _tensor_size(self.ptr, i) for i in range(self.n_tensors)
        ]
        wanted = _data_offset(self.ptr) + max(ends) if ends else 0
        size = self.path.stat().st_size
        return "" if size >= wanted else f"is cut short: {size:,} of {wanted:,} bytes"

    def get(self, key: str, default: Any = None) -> Any:
        """The key's number, text or list of numbers; `default` if it is not there or is a list
        of something else."""
        at = _find_key(self.ptr, key.encode())
        if at < 0:
            return default
        kind = _kv_type(self.ptr, at)
        if kind == _STRING:
            return _val_str(self.ptr, at).decode("utf-8", "replace")
        if kind != _ARRAY:
            return _numbers(_val_data(self.ptr, at), kind, 1)[0].item()
        kind = _arr_type(self.ptr, at)
        if kind not in _SCALARS:
            return default
        return _numbers(_arr_data(self.ptr, at), kind, _arr_n(self.ptr, at)).tolist()

    def counts(self, key: str, default: int = 0, high: int = COUNT_MAX) -> list[int]:
        """The key's list of numbers of something, one for each layer, or its one number. Raises
        ModelError for anything else, and for numbers below 0 or above `high`."""
        value = self.get(key, default)
        found = value if isinstance(value, list) else [value]
        if not all(type(each) is int and 0 <= each <= high for each in found):
            raise ModelError(
                f"{self.path} is damaged: its {key} is not a count; fetch or convert it again."
            )
        return found

    def count(self, key: str, default: int = 0, high: int = COUNT_MAX) -> int:
        """The largest of `counts`; 0 for an empty list. Raises ModelError."""
        return max(self.counts(key, default, high), default=0)

    def strings(self, key: str) -> list[bytes]:
        """The key's list of texts; empty if it is not there or is something else."""
        at = _find_key(self.ptr, key.encode())
        if at < 0 or _kv_type(self.ptr, at) != _ARRAY or _arr_type(self.ptr, at) != _STRING:
            return []
        return [_arr_str(self.ptr, at, i) for i in range(_arr_n(self.ptr, at))]

    def floats(self, name: str) -> tuple[float, ...] | None:
        """A float32 tensor's values; None if the file has no such tensor of that type."""
        at = _find_tensor(self.ptr, name.encode())
        if at < 0 or _tensor_type(self.ptr, at) != _F32:
            return None
        with self.path.open("rb") as file:
            file.seek(_data_offset(self.ptr) + _tensor_offset(self.ptr, at))
            data = file.read(_tensor_size(self.ptr, at))
        return tuple(np.frombuffer(data, "<f4").tolist())


def _numbers(address: int, kind: int, n: int) -> npt.NDArray[Any]:
    dtype = np.dtype(_SCALARS[kind])
    return np.frombuffer(ctypes.string_at(address, n * dtype.itemsize), dtype)
