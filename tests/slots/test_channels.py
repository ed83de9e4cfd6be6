"""Rows whose V is channel by channel, and rows that are a blob: the same values as any others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_rows import LAYOUT, make, same

from towerd.slots.blob import emit_blob, parse_blob, parse_rows
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import KVRows, join
from towerd.slots.runs import Runs

WINDOWED = KVLayout(
    (Plane(1, 128), Plane(1, 64), Plane(1, 64)),
    (Plane(1, 32), Plane(1, 64), Plane(0, 128)),
    n_window=2,
)
EXTENDED = KVLayout((Plane(1, 128),), (Plane(0, 64),), cell_ext=True)
LAYOUTS = {"mixed": LAYOUT, "window": WINDOWED, "extended": EXTENDED}


def channels(p0: int, p1: int, layout: KVLayout = LAYOUT) -> tuple[KVRows, bytes]:
    """Rows as a context without flash attention gives them, and their blob."""
    blob = bytes(emit_blob([make(p0, p1, layout)], layout=layout, v_trans=True))
    rows = parse_rows(blob, cell_ext=layout.cell_ext, has_window=layout.n_window > 0, layout=layout)
    return rows, blob


@pytest.mark.parametrize("name", LAYOUTS)
@given(cuts=st.sets(st.integers(1, 29)), mix=st.integers(0, 2**30), v_trans=st.booleans())
@settings(deadline=None)
def test_any_mixture_composes(name: str, cuts: set[int], mix: int, v_trans: bool) -> None:
    """Parts of either kind, copied or not, give the bytes that token-major rows give."""
    layout = LAYOUTS[name]
    plain = make(10, 40, layout)
    rows, _ = channels(10, 40, layout)
    assert rows.v_trans
    assert same(rows, plain)
    edges = [10, *(10 + cut for cut in sorted(cuts)), 40]
    parts = []
    for number, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
        part = (plain if mix >> number & 1 else rows).slice(a, b)
        parts.append(part.copy() if mix >> number & 2 else part)
        assert same(parts[-1], plain.slice(a, b))
        assert same(parts[-1].token_major(), plain.slice(a, b))
    expected = bytes(emit_blob([plain], layout=layout, v_trans=v_trans))
    assert bytes(emit_blob(parts, layout=layout, v_trans=v_trans)) == expected
    assert bytes(emit_blob(Runs(tuple(parts)).parts, layout=layout, v_trans=v_trans)) == expected
    assert same(join(parts), plain)


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_know_their_blob(name: str, v_trans: bool) -> None:
    """Only while they are all of its rows; a copy has a copy of it."""
    layout = LAYOUTS[name]
    blob = np.frombuffer(
        bytes(emit_blob([make(3, 20, layout)], layout=layout, v_trans=v_trans)), np.uint8
    )
    rows = parse_rows(blob, cell_ext=layout.cell_ext, has_window=layout.n_window > 0, layout=layout)
    assert rows.blob is not None
    assert np.shares_memory(rows.blob, blob)
    assert all(np.shares_memory(plane, blob) for plane in (*rows.k, *rows.v))
    assert rows.slice(3, 20) is rows
    assert rows.slice(3, 19).blob is None
    copy = rows.copy()
    assert copy.blob is not None
    assert same(copy, rows)
    assert np.array_equal(copy.blob, blob)
    assert not np.shares_memory(copy.blob, blob)
    assert all(np.shares_memory(plane, copy.blob) for plane in (*copy.k, *copy.v))
    again = parse_rows(
        copy.blob, cell_ext=layout.cell_ext, has_window=layout.n_window > 0, layout=layout
    )
    assert same(again, make(3, 20, layout))


def test_other_frames_are_no_blob() -> None:
    """Streams and cells out of order are not what a unified context takes back."""
    rows = make(0, 9)
    assert parse_rows(emit_blob([rows], n_stream=2)).blob is None
    swapped = bytearray(emit_blob([rows]))
    cell = 12
    first, second = (slice(8 + 8 + cell * i, 8 + 8 + cell * (i + 1)) for i in range(2))
    swapped[first], swapped[second] = swapped[second], swapped[first]
    moved = parse_rows(bytes(swapped))
    assert moved.blob is None
    assert moved.positions.tolist() == list(range(9))


def test_out_of_order_is_token_major() -> None:
    """Cells that are sorted on the way in leave V token-major, with the right rows."""
    blob = bytearray(emit_blob([make(0, 9)], v_trans=True))
    first, second = slice(16, 28), slice(28, 40)
    blob[first], blob[second] = blob[second], blob[first]
    rows = parse_rows(bytes(blob))
    assert not rows.v_trans
    expected = parse_blob(bytes(blob)).rows
    assert same(rows, expected)
    assert bytes(rows.v[0][0]) == bytes(make(0, 9).v[0][1])


BAD = {
    "one plane": ((64, 40), None),
    "shape": ((32, 39), (16, 40)),
    "turned": ((20, 64), (20, 32)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_channels_are_refused(name: str) -> None:
    """Shapes that do not fit the layout, and types that cannot be transposed."""
    rows = make(0, 20)
    v = tuple(np.zeros(shape, np.uint8) for shape in BAD[name] if shape is not None)
    with pytest.raises(StateError, match="v"):
        KVRows(rows.layout, rows.positions, rows.k, v, None, True)


def test_quantized_channels_are_refused() -> None:
    """llama.cpp does not have them."""
    layout = KVLayout((Plane(1, 128),), (Plane(8, 68),))
    rows = make(0, 20, layout)
    with pytest.raises(StateError, match="cannot be transposed"):
        KVRows(layout, rows.positions, rows.k, rows.v, None, True)
    spread = np.zeros((32, 80), np.uint8)[:, ::2]
    rows = make(0, 20)
    with pytest.raises(StateError, match="contiguous"):
        KVRows(rows.layout, rows.positions, rows.k, (spread, spread[:16]), None, True)
