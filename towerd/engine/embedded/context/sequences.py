"""Sequences: the memory of a llama context, sequence by sequence."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from towerd.errors import TowerdError
from towerd.llama_library import lib
from towerd.model.llama_log import last_errors

Buffer = npt.NDArray[np.uint8]

_U8P = ctypes.POINTER(ctypes.c_uint8)


class Sequences:
    """The sequences of a `llama_context` that outlives this object. Not thread-safe."""

    def __init__(self, ptr: Any) -> None:
        self.ptr = ptr
        self._mem = lib.llama_get_memory(ptr)

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        if not lib.llama_memory_seq_rm(self._mem, seq, p0, p1):
            raise TowerdError(f"llama.cpp cannot remove positions [{p0}, {p1}) of a sequence.")

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Share cells of `src` with `dst`; no bytes move in a unified cache."""
        lib.llama_memory_seq_cp(self._mem, src, dst, p0, p1)

    def pos_max(self, seq: int) -> int:
        """The last position of a sequence, -1 when it is empty."""
        return int(lib.llama_memory_seq_pos_max(self._mem, seq))

    def pos_min(self, seq: int) -> int:
        return int(lib.llama_memory_seq_pos_min(self._mem, seq))

    def state_size(self, seq: int, flags: int = 0) -> int:
        """Bytes of the sequence blob. flags: those of llama.cpp"""
        return int(lib.llama_state_seq_get_size_ext(self.ptr, seq, flags))

    def get_state(self, seq: int, flags: int = 0) -> Buffer:
        """The sequence blob as uint8[n]."""
        size = self.state_size(seq, flags)
        blob = np.empty(size, np.uint8)
        data = blob.ctypes.data_as(_U8P)
        got = lib.llama_state_seq_get_data_ext(self.ptr, data, size, seq, flags)
        if got != size:
            raise TowerdError(f"llama.cpp wrote {got} of {size} state bytes.")
        return blob

    def set_state(self, seq: int, blob: Buffer, flags: int = 0) -> None:
        """Replace a sequence, or its part that `flags` names, by a blob. Raises TowerdError;
        the sequence is then empty."""
        size = blob.nbytes
        data = blob.ctypes.data_as(_U8P)
        used = lib.llama_state_seq_set_data_ext(self.ptr, data, size, seq, flags)
        if used != size:
            raise TowerdError(f"llama.cpp refused a state of {size} bytes: {last_errors()}")
