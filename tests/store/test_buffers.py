"""Buffers that are used again: none while any view of it is left."""

from __future__ import annotations

import gc

import numpy as np

from towerd.store.files.buffers import BufferPool

MIB = 1 << 20


def test_what_is_lent_comes_back_with_its_last_view() -> None:
    pool = BufferPool()
    lent = pool.lend(3 * MIB)
    lent[:] = 7
    bytes_of = lent.data[100:]
    rows = np.frombuffer(bytes_of, np.uint8)[5:1005].reshape(10, 100).view(np.int32)
    place = lent.ctypes.data
    del lent, bytes_of
    gc.collect()
    other = pool.lend(3 * MIB)
    assert other.ctypes.data != place
    other[:] = 9
    assert (rows.view(np.uint8) == 7).all()
    del rows
    gc.collect()
    assert pool.lend(2 * MIB).ctypes.data == place


def test_no_more_is_kept_than_may_be() -> None:
    """The largest, and one in any case."""
    pool = BufferPool(6 * MIB)
    small, large = [pool.acquire(2 * MIB) for _ in range(2)], pool.acquire(4 * MIB)
    place = large.ctypes.data
    for each in (*small, large):
        pool.release(each)
    del small, large, each
    assert pool.acquire(3 * MIB).ctypes.data == place
    first = pool.acquire(2 * MIB)
    pool.release(first)
    pool.clear()
    huge = pool.lend(9 * MIB)
    place = huge.ctypes.data
    del huge
    assert pool.acquire(9 * MIB).ctypes.data == place
