"""The C library's allocator, set so that freed rows go back to the system."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

LARGE_BYTES = 1 << 20
"""Allocations of this size or more are mapped one by one, and unmapped when they are freed."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def return_large_blocks() -> None:
    """Have glibc give every large block back when it is freed; nothing happens with another C
    library. By itself glibc raises its threshold up to 32 MiB as soon as such a block was freed, and
    then keeps freed rows between others that are in use."""
    if sys.platform != "linux":
        return
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, LARGE_BYTES)
