"""Results beyond the size from which kernels write past the caches: the same bytes as when they are
made in parts, at any address, with nothing beside them touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_rows import rows_of

from towerd.kernels import dispatch
from towerd.kernels.formats import BY_NAME

STREAM_BYTES = pytest.importorskip("towerd.kernels._native").STREAM_BYTES
PARTS = 4
"""A quarter of what is large is not."""
HIDDEN = 0xEE


def _many(name: str, n_elements: int, result_bytes: int, wanted: int = STREAM_BYTES) -> Any:
    """Rows of which the result has `result_bytes` each, a little more than `wanted` in all. Their
    numbers come again after 61 rows, which is no multiple of a line or page."""
    few = rows_of(name, 61, n_elements)
    n = wanted // result_bytes + 5
    return np.tile(few, (n // 61 + 1, 1))[:n]


def _target(n: int, row_bytes: int, shift: int, gap: int) -> tuple[Any, Any]:
    """(memory, rows in it `gap` bytes apart that begin `shift` bytes behind a line)."""
    memory = np.full(64 + shift + n * (row_bytes + gap) + 64, HIDDEN, np.uint8)
    start = -memory.ctypes.data % 64 + shift
    apart = memory[start : start + n * (row_bytes + gap)].reshape(n, row_bytes + gap)
    return memory, apart[:, :row_bytes]


def _check(memory: Any, got: Any, expected: Any) -> None:
    assert np.array_equal(got, expected)
    got[:] = HIDDEN
    assert (memory == HIDDEN).all()


@pytest.mark.parametrize(
    ("name", "shape", "block", "shift", "gap"),
    [
        # head_dim, n_rot, first, heads, neox
        ("f16", (128, 128, 0, 8, True), 0, 0, 0),
        ("f16", (128, 64, 0, 8, False), 0, 16, 0),
        ("f16", (80, 20, 4, 7, True), 0, 1, 0),
        ("bf16", (64, 64, 0, 3, False), 0, 63, 5),
        ("f32", (576, 64, 512, 4, True), 0, 4, 0),  # rows longer than a stage
        ("q8_0", (128, 128, 0, 4, True), 128, 3, 0),
    ],
)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_rope_shift(
    kernels: str, name: str, shape: Any, block: int, shift: int, gap: int, n_threads: int
) -> None:
    """Rotated rows, some of them only copied."""
    head_dim, n_rot, first, heads, neox = shape
    n_elements = head_dim * heads
    rows = _many(name, n_elements, BY_NAME[name].row_bytes(n_elements))
    angles = np.random.default_rng(0).normal(size=(4, n_rot // 2))
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    lines = np.random.default_rng(1).integers(-1, 4, len(rows), np.int32)
    memory, out = _target(len(rows), rows.shape[1], shift, gap)
    rest: Any = (head_dim, n_rot, first, neox, block, n_threads)
    dispatch.rope_shift(rows, out, name, *tables, lines, *rest)
    expected = np.empty_like(rows)
    step = len(rows) // PARTS
    for at in range(0, len(rows), step):
        part = slice(at, at + step)
        dispatch.rope_shift(rows[part], expected[part], name, *tables, lines[part], *rest)
    _check(memory, out, expected)


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("shift", [0, 1, 16])
def test_transcode(kernels: str, shift: int, n_threads: int) -> None:
    """Jobs of several formats that are large together: decoded, converted, copied, picked."""
    jobs: list[Any] = []
    at = 0
    for i, (have, want, n_elements) in enumerate(
        [
            ("q4h", "f16", 1024),
            ("q8", "f16", 1120),
            ("f32", "f16", 1000),
            ("f16", "f32", 2500),
            ("f16", "f16", 1001),
            ("q6h", "bf16", 96),
        ]
    ):
        rows = _many(have, n_elements, BY_NAME[want].row_bytes(n_elements), STREAM_BYTES // 6)
        order = np.random.default_rng(i).permutation(len(rows)).astype(np.int64)
        jobs.append((at, rows, order if i % 2 else None, have, want))
        at += len(rows) * BY_NAME[want].row_bytes(n_elements) + i % 3
    memory, out = _target(1, at, shift, 0)
    dispatch.transcode(out[0], jobs, n_threads)
    expected = np.full(at, HIDDEN, np.uint8)
    for job in jobs:
        dispatch.transcode(expected, [job], n_threads)
    _check(memory, out[0], expected)
    dispatch.transcode(out[0], jobs, n_threads, True)
    assert np.array_equal(out[0], expected)


@pytest.mark.parametrize(("have", "want"), [("q8", "f32"), ("f32", "q8"), ("f16", "q6h")])
def test_transcoded(kernels: str, have: str, want: str) -> None:
    """New memory, into element and block formats."""
    rows = _many(have, 1024, BY_NAME[want].row_bytes(1024))
    step = len(rows) // PARTS
    parts = [
        dispatch.transcoded(rows[at : at + step], have, want) for at in range(0, len(rows), step)
    ]
    assert np.array_equal(dispatch.transcoded(rows, have, want, 2), np.concatenate(parts))
