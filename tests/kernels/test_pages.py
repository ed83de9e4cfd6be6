"""Pages that are asked for are in RAM, no others, and what is stored in them stays."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import pytest

from towerd.kernels._native import populate

PAGE = mmap.PAGESIZE
N = 600

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this call")


def pages_in_ram(address: int, n: int) -> set[int]:
    """Which of `n` pages from `address` on are in RAM."""
    found = ctypes.create_string_buffer(n)
    ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(n * PAGE), found)
    return {i for i, byte in enumerate(found.raw) if byte & 1}


@pytest.mark.parametrize(
    ("first", "stride", "n", "run_bytes"),
    [
        (0, 0, 1, N * PAGE),  # more than one call may take
        (3 * PAGE + 80, 0, 1, 2 * PAGE),
        (80, 4 * PAGE + PAGE // 2, 100, PAGE),  # as the channels of a transposed V
        (PAGE - 1, PAGE, 50, 2),  # neighbours share pages
        (5, 64, 300, 32),
        (7, 3 * PAGE, 0, 100),
        (7, 3 * PAGE, 9, 0),
    ],
)
def test_runs_are_in_ram(first: int, stride: int, n: int, run_bytes: int) -> None:
    memory = mmap.mmap(-1, N * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    data[9::PAGE][::7] = 42
    address = data.ctypes.data
    before = pages_in_ram(address, N)
    if not populate(address, 0, 1, 1):
        pytest.skip("this kernel is older than 5.14")
    assert populate(address + first, stride, n, run_bytes)
    runs = [first + i * stride for i in range(n)] if run_bytes else []
    asked = {page for a in runs for page in range(a // PAGE, (a + run_bytes - 1) // PAGE + 1)}
    assert pages_in_ram(address, N) == before | asked | {0}
    assert np.array_equal(np.flatnonzero(data), np.arange(9, N * PAGE, 7 * PAGE))


def test_memory_that_is_not_there_is_no_error() -> None:
    memory = mmap.mmap(-1, PAGE)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    assert not populate(address, 1 << 46, 2, 1)
