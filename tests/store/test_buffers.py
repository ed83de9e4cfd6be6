"""Buffers that are used again: none while any view of it is left."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import numpy as np

from towerd.store.files import buffers
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


def test_a_loan_that_ends_while_another_begins() -> None:
    """The collector ends it at the worst moments: at each line that the pool runs, in turn."""
    n_lines = 1
    while ends_at(n_lines):
        n_lines += 1
    assert n_lines > 8


def ends_at(n_lines: int) -> bool:
    """A loan ends before this line of taking another buffer; False: there are fewer. No buffer is lost or taken twice."""
    pool = BufferPool()
    idle = [pool.acquire(n * MIB) for n in (4, 3, 2)]
    loans = [pool.lend(9 * MIB)]
    while idle:
        pool.release(idle.pop())
    n_seen = 0

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal n_seen
        if frame.f_code.co_filename != buffers.__file__:
            return None
        n_seen += event == "line"
        if n_seen == n_lines:
            loans.clear()
        return at_line

    before = sys.gettrace()
    sys.settrace(at_line)
    try:
        taken = [pool.acquire(MIB)]
    finally:
        sys.settrace(before)
    has_ended = not loans
    loans.clear()
    taken += [pool.acquire(MIB) for _ in range(4)]
    assert sorted(len(each) // MIB for each in taken) == [1, 2, 3, 4, 9]
    assert len({each.ctypes.data for each in taken}) == 5
    return has_ended
