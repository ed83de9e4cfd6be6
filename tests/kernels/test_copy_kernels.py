"""copy_planes: right bytes in the right places, nothing touched on bad input."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab import reference
from towerd.kernels import dispatch

MANY = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _rows(n: int, row_bytes: int, gap: int = 0, seed: int = 0) -> Any:
    """uint8[n, row_bytes] with rows `gap` bytes apart."""
    data = np.random.default_rng(seed).integers(0, 256, (n, row_bytes + gap), np.uint8)
    return data[:, :row_bytes]


@st.composite
def job_lists(draw: st.DrawFn) -> tuple[int, list[Any]]:
    """(bytes of dst, jobs that fit into it without touching each other)."""
    jobs: list[Any] = []
    at = 0
    for seed in range(draw(st.integers(0, 6))):
        at += draw(st.integers(0, 5))
        n = draw(st.integers(0, 40) | st.just(3000))
        rows = _rows(n, draw(st.sampled_from([1, 2, 7, 64, 512])), draw(st.integers(0, 3)), seed)
        index = None
        if n and draw(st.booleans()):
            index = np.array(draw(st.lists(st.integers(0, n - 1), max_size=50)), np.int64)
        jobs.append((at, rows, index))
        at += rows.shape[1] * (n if index is None else len(index))
    return at + draw(st.integers(0, 5)), draw(st.permutations(jobs))


@given(case=job_lists(), n_threads=st.integers(1, 5))
@MANY
def test_equals_reference(kernels: str, case: tuple[int, list[Any]], n_threads: int) -> None:
    """Any list of jobs gives the same bytes, and what lies between them stays."""
    size, jobs = case
    results = []
    for module in (dispatch, reference):
        dst = np.full(size, 0xEE, np.uint8)
        module.copy_planes(dst, jobs, n_threads)
        results.append(dst)
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("n_threads", [1, 2, 3, 8])
def test_large_copy(kernels: str, n_threads: int) -> None:
    """Megabytes over several threads: plain, strided and gathered rows."""
    plain, strided = _rows(3000, 1024), _rows(3000, 1024, 16)
    index = np.random.default_rng(2).permutation(3000).astype(np.int64)
    dst = np.zeros(3 * plain.nbytes, np.uint8)
    jobs = [(0, plain, None), (plain.nbytes, strided, None), (2 * plain.nbytes, plain, index)]
    dispatch.copy_planes(dst, jobs, n_threads)
    a, b, c = dst.reshape(3, 3000, 1024)
    assert np.array_equal(a, plain)
    assert np.array_equal(b, strided)
    assert np.array_equal(c, plain[index])


def test_any_buffer(kernels: str) -> None:
    """bytearray as target, read-only rows and a ctypes-like index buffer as sources."""
    rows = np.frombuffer(b"aabbcc", np.uint8).reshape(3, 2)
    dst = bytearray(b"......")
    dispatch.copy_planes(dst, [(1, rows, array.array("q", [2, 0]))])  # type: ignore[list-item]
    assert dst == b".ccaa."


def test_nothing_to_do(kernels: str) -> None:
    """Empty lists, empty rows and empty indices are fine."""
    dst = np.ones(3, np.uint8)
    empty = np.empty(0, np.int64)
    dispatch.copy_planes(dst, [])
    dispatch.copy_planes(dst, [(3, _rows(0, 8), None), (0, _rows(4, 8), empty)])
    dispatch.copy_planes(bytearray(), ())
    assert dst.tolist() == [1, 1, 1]


ROWS = _rows(4, 8)
DST = np.zeros(32, np.uint8)
READ_ONLY = np.zeros(32, np.uint8)
READ_ONLY.flags.writeable = False
ODD = np.frombuffer(bytes(17), np.uint8)[1:].view(np.int64)
BAD_COPIES: dict[str, tuple[str, Any, Any, Any]] = {
    "float dst": ("dst", np.zeros(32, np.float32), [], 1),
    "signed dst": ("dst", np.zeros(32, np.int8), [], 1),
    "square dst": ("dst", np.zeros((4, 8), np.uint8), [], 1),
    "read-only dst": ("dst", READ_ONLY, [], 1),
    "bytes dst": ("dst", b"1234", [], 1),
    "strided dst": ("dst", np.zeros(64, np.uint8)[::2], [], 1),
    "no dst": ("dst", None, [], 1),
    "jobs no list": ("jobs", DST, iter([]), 1),
    "jobs none": ("jobs", DST, None, 1),
    "job no tuple": (r"jobs\[0\]", DST, [[0, ROWS, None]], 1),
    "job pair": (r"jobs\[1\]", DST, [(0, ROWS[:1], None), (0, ROWS)], 1),
    "offset negative": (r"jobs\[0\].offset", DST, [(-1, ROWS, None)], 1),
    "offset beyond": (r"jobs\[0\].offset", DST, [(33, ROWS, None)], 1),
    "offset huge": (r"jobs\[0\].offset", DST, [(1 << 70, ROWS, None)], 1),
    "offset float": (r"jobs\[0\].offset", DST, [(0.0, ROWS, None)], 1),
    "rows float": (r"jobs\[0\].rows", DST, [(0, np.zeros((4, 8), np.float32), None)], 1),
    "rows flat": (r"jobs\[0\].rows", DST, [(0, np.zeros(8, np.uint8), None)], 1),
    "rows text": (r"jobs\[0\].rows", DST, [(0, "rows", None)], 1),
    "rows columns": (r"jobs\[0\].rows", DST, [(0, _rows(4, 8)[:, ::2], None)], 1),
    "rows backwards": (r"jobs\[0\].rows", DST, [(0, _rows(4, 8)[::-1], None)], 1),
    "rows repeated": (r"jobs\[0\].rows", DST, [(0, np.broadcast_to(ROWS[0], (4, 8)), None)], 1),
    "too many rows": (r"jobs\[0\]", DST, [(1, ROWS, None)], 1),
    "index gathers too many": (r"jobs\[0\]", DST, [(0, ROWS, np.zeros(5, np.int64))], 1),
    "index int32": (r"jobs\[0\].index", DST, [(0, ROWS, np.zeros(1, np.int32))], 1),
    "index unsigned": (r"jobs\[0\].index", DST, [(0, ROWS, np.zeros(1, np.uint64))], 1),
    "index negative": (r"jobs\[0\].index", DST, [(0, ROWS, np.array([-1]))], 1),
    "index beyond": (r"jobs\[0\].index", DST, [(0, ROWS, np.array([0, 4]))], 1),
    "index strided": (r"jobs\[0\].index", DST, [(0, ROWS, np.zeros(4, np.int64)[::2])], 1),
    "index unaligned": (r"jobs\[0\].index", DST, [(0, ROWS, ODD)], 1),
    "jobs overlap": ("jobs", DST, [(0, ROWS[:2], None), (15, ROWS[:1], None)], 1),
    "source in dst": ("jobs", DST, [(0, DST.reshape(4, 8)[2:], None)], 1),
    "no threads": ("n_threads", DST, [], 0),
    "many threads": ("n_threads", DST, [], 1025),
    "threads text": ("n_threads", DST, [], "2"),
}


@pytest.mark.parametrize("name", BAD_COPIES)
def test_bad_copies(kernels: str, name: str) -> None:
    """Every bad argument is named, and a good job beside a bad one has not run."""
    argument, dst, jobs, n_threads = BAD_COPIES[name]
    before = bytes(DST)
    with pytest.raises(ValueError, match=f"^{argument}[.: ]"):
        dispatch.copy_planes(dst, jobs, n_threads)
    assert bytes(DST) == before
