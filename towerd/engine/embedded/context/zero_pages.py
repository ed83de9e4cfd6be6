"""Memory of a new context that nothing has used yet goes back to the system until it is.

llama.cpp writes zeros to every cell of a KV cache when it makes one, so that all of it takes RAM.
Pages of zeros that are given back read as zeros, and take RAM again from the first row on that is
written to them. A daemon therefore grows with the conversations that it holds.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from towerd.llama_library import lib

BLOCK_BYTES = 1 << 20
"""Pages are looked at and given back in blocks of this size."""
BUFFER_BYTES_MIN = 8 << 20
"""Smaller buffers are not worth a look."""

_ALLOC_BUFFER = 1
"""Place of `alloc_buffer` among the functions of a ggml_backend_buffer_type
(ggml/src/ggml-backend-impl.h); that of `get_name` is 0."""
_Alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class HostBuffer(NamedTuple):
    """Main memory that llama.cpp has allocated."""

    base: int
    """Address of its first byte."""
    n_bytes: int


@contextmanager
def zero_pages_returned() -> Iterator[list[HostBuffer]]:
    """Give back the pages of zeros in what llama.cpp allocates inside the block, in this thread and
    in main memory. The list has these buffers after the block, in order. Elsewhere than on Linux,
    and where ggml is built otherwise, nothing happens, and the list stays empty."""
    ggml = _ggml()
    found: list[HostBuffer] = []
    if ggml is None:
        yield found
        return
    functions = (ctypes.c_void_p * 2).from_address(ggml.ggml_backend_cpu_buffer_type())
    real = functions[_ALLOC_BUFFER]
    assert real is not None
    allocate = _Alloc(real)
    buffers: list[int] = []
    thread = threading.get_ident()

    def record(buffer_type: int, n_bytes: int) -> int | None:
        buffer: int | None = allocate(buffer_type, n_bytes)
        if buffer and n_bytes >= BUFFER_BYTES_MIN and threading.get_ident() == thread:
            buffers.append(buffer)
        return buffer

    recorder = _Alloc(record)
    functions[_ALLOC_BUFFER] = ctypes.cast(recorder, ctypes.c_void_p).value
    try:
        yield found
    finally:
        functions[_ALLOC_BUFFER] = real
    for buffer in buffers:
        base = ggml.ggml_backend_buffer_get_base(buffer)
        found.append(HostBuffer(base, ggml.ggml_backend_buffer_get_size(buffer)))
        _return_zeros(*found[-1])


def _return_zeros(base: int, n_bytes: int) -> None:
    """Give back every block of zeros that lies in [base, base + n_bytes)."""
    libc = ctypes.CDLL(None)
    libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    page = mmap.PAGESIZE
    in_ram = ctypes.create_string_buffer(BLOCK_BYTES // page)
    start, end = -(-base // page) * page, (base + n_bytes) // page * page
    zeros = bytes(page)
    for at in range(start, end, BLOCK_BYTES):
        size = min(BLOCK_BYTES, end - at)
        if not libc.mincore(at, size, in_ram) and not any(in_ram.raw[: size // page]):
            continue
        # All bytes equal those one page before, and the first page is zero.
        is_zero = not libc.memcmp(at, zeros, page) and not libc.memcmp(at, at + page, size - page)
        if is_zero:
            libc.madvise(at, size, mmap.MADV_DONTNEED)


def _ggml() -> ctypes.CDLL | None:
    """The library with ggml's buffers, if it is as this module expects."""
    if sys.platform != "linux":
        return None
    ggml: ctypes.CDLL = lib._lib
    ggml.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    ggml.ggml_backend_buffer_get_base.restype = ctypes.c_void_p
    ggml.ggml_backend_buffer_get_base.argtypes = (ctypes.c_void_p,)
    ggml.ggml_backend_buffer_get_size.restype = ctypes.c_size_t
    ggml.ggml_backend_buffer_get_size.argtypes = (ctypes.c_void_p,)
    buffer_type = ggml.ggml_backend_cpu_buffer_type()
    get_name = (ctypes.c_void_p * 1).from_address(buffer_type)[0]
    if get_name is None:
        return None
    name = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(get_name)
    return ggml if name(buffer_type) == b"CPU" else None
