"""KVRows, layouts and what can be composed from them, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_rows import EXTENDED, F16, LAYOUT, Q8, make, same

from towerd.kernels import dispatch
from towerd.slots.blob import blob_size, emit_blob, parse_blob
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows, delta, join


def test_numbers() -> None:
    """Sizes and bounds."""
    rows = make(5, 25)
    assert (rows.p0, rows.p1, len(rows)) == (5, 25, 20)
    assert rows.layout.token_bytes == 128 + 68 + 64 + 32
    assert rows.nbytes == 20 * rows.layout.token_bytes == sum(p.nbytes for p in rows.planes())
    assert EXTENDED.token_bytes == 128 + 12
    assert [plane.n_elements for plane in LAYOUT.planes] == [64, 64, 32, 16]
    assert make(0, 9, step=2).p1 == 9
    assert not make(0, 9, step=2).is_consecutive


@pytest.mark.parametrize("layout", [LAYOUT, EXTENDED], ids=["plain", "extended"])
@given(cuts=st.sets(st.integers(1, 49)), v_trans=st.booleans(), n_stream=st.integers(1, 4))
@settings(deadline=None)
def test_cut_and_compose(layout: KVLayout, cuts: set[int], v_trans: bool, n_stream: int) -> None:
    """However rows are cut: join, and a blob of the parts, give them back."""
    rows = make(10, 60, layout)
    edges = [0, *sorted(cuts), 50]
    parts = [rows.slice(10 + a, 10 + b) for a, b in zip(edges, edges[1:], strict=False)]
    assert same(join(parts), rows)
    frame: dict[str, Any] = {
        "v_trans": v_trans,
        "n_stream": n_stream,
        "stream": n_stream - 1,
        "seq_id": 3,
    }
    blob = emit_blob(parts, **frame)
    assert len(blob) == blob_size(layout, 50, n_stream=n_stream, v_trans=v_trans)
    state = parse_blob(blob, cell_ext=layout.cell_ext, layout=layout)
    assert same(state.rows, rows)
    assert (state.frame.v_trans, state.frame.stream, state.frame.seq_id) == (
        v_trans,
        n_stream - 1,
        3,
    )
    assert state.to_bytes() == blob


def test_cut_between_k_and_v() -> None:
    """A blob that ends after K passes as one without V unless the layout is known."""
    blob = bytes(emit_blob([make(0, 4)]))[: -2 * 12 - 4 * (64 + 32)]
    assert parse_blob(blob).rows.layout.v == ()
    with pytest.raises(StateError, match="V absent; expected"):
        parse_blob(blob, layout=LAYOUT)


def test_views_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """slice, split and delta share memory; copy and join of several do not."""
    rows = make(0, 20)
    assert rows.slice(0, 20) is rows is join([rows])
    assert np.shares_memory(rows.slice(3, 9).k[1], rows.k[1])
    assert np.shares_memory(delta(rows, 7).v[0], rows.v[0])
    for name in dispatch.available():
        monkeypatch.setenv("TOWERD_KERNELS", name)
        assert dispatch.name() == name
        for other in (rows.copy(), join(rows.split(4))):
            assert same(other, rows)
            assert not np.shares_memory(other.k[0], rows.k[0])


def test_delta() -> None:
    """What a child adds to its parent; holes after the parent are an error."""
    rows = make(0, 20)
    assert same(delta(rows, 7), make(7, 20))
    assert same(delta(make(4, 20), 4), make(4, 20))
    with pytest.raises(StateError, match="no rows"):
        delta(rows, 20)
    with pytest.raises(StateError, match="rows 2 to 3 after the parent are missing"):
        delta(make(4, 20), 2)


BAD_COMPOSITIONS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: emit_blob([]),
    "join nothing": lambda: join([]),
    "gap": lambda: emit_blob([make(0, 4), make(5, 8)]),
    "overlap": lambda: emit_blob([make(0, 4), make(3, 8)]),
    "order": lambda: join([make(4, 8), make(0, 4)]),
    "layouts": lambda: join([make(0, 4), make(4, 8, EXTENDED)]),
    "stream": lambda: emit_blob([make(0, 4)], n_stream=2, stream=2),
    "streams": lambda: emit_blob([make(0, 4)], n_stream=257),
    "seq_id": lambda: emit_blob([make(0, 4)], seq_id=-1),
    "quantized V": lambda: emit_blob([make(0, 4, KVLayout((F16,), (Q8,)))], v_trans=True),
    "out short": lambda: emit_blob([make(0, 4)], out=bytearray(9)),
    "out read-only": lambda: emit_blob([make(0, 4)], out=bytes(9999)),
    "out text": lambda: emit_blob([make(0, 4)], out="text"),
    "out strided": lambda: emit_blob([make(0, 4)], out=memoryview(bytearray(9999))[::2]),
    "size of nothing": lambda: blob_size(LAYOUT, 0),
    "slice of nothing": lambda: make(0, 4).slice(4, 9),
    "empty slice": lambda: make(0, 4).slice(2, 2),
    "split at an end": lambda: make(0, 4).split(0),
}


@pytest.mark.parametrize("name", BAD_COMPOSITIONS)
def test_bad_compositions(name: str) -> None:
    """What does not fit together is a StateError."""
    with pytest.raises(StateError):
        BAD_COMPOSITIONS[name]()


GOOD: dict[str, Any] = {
    "layout": KVLayout((F16,), (F16,)),
    "positions": np.arange(2, dtype=np.int32),
    "k": (np.zeros((2, 128), np.uint8),),
    "v": (np.zeros((2, 128), np.uint8),),
    "ext": None,
}
BAD_ROWS: dict[str, dict[str, Any]] = {
    "int64 positions": {"positions": np.arange(2)},
    "no positions": {"positions": np.empty(0, np.int32)},
    "square positions": {"positions": np.zeros((1, 2), np.int32)},
    "equal positions": {"positions": np.array([3, 3], np.int32)},
    "descending positions": {"positions": np.array([3, 2], np.int32)},
    "negative positions": {"positions": np.array([-1, 2], np.int32)},
    "no v": {"v": ()},
    "short rows": {"k": (np.zeros((2, 126), np.uint8),)},
    "few rows": {"k": (np.zeros((1, 128), np.uint8),)},
    "typed rows": {"k": (np.zeros((2, 128), np.int8),)},
    "strided rows": {"k": (np.zeros((2, 256), np.uint8)[:, ::2],)},
    "ext": {"ext": np.zeros((2, 3), np.int32)},
    "no ext": {"layout": KVLayout((F16,), (F16,), True)},
    "flat ext": {"layout": KVLayout((F16,), (F16,), True), "ext": np.zeros(6, np.int32)},
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(name: str) -> None:
    """Arrays that do not fit the layout are refused when the value is made."""
    KVRows(**GOOD)
    with pytest.raises(StateError):
        KVRows(**(GOOD | BAD_ROWS[name]))


def test_layout_json() -> None:
    """Through JSON text and back."""
    for layout in (LAYOUT, EXTENDED):
        assert KVLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


BAD_LAYOUTS = [
    None,
    {},
    {"k": [[1, 128]], "v": []},
    {"k": [[1, 128]], "v": [], "cell_ext": 0},
    {"k": [[1, 128]], "v": [], "cell_ext": False, "more": 1},
    {"k": [], "v": [[1, 128]], "cell_ext": False},
    {"k": [[1, 128]], "v": [], "cell_ext": False, "n_window": 1},
    {"k": [[1, 128]] * 2, "v": [], "cell_ext": False, "n_window": -1},
    {"k": [[1, 128]] * 2, "v": [], "cell_ext": False, "n_window": True},
    {"k": [[1, 128]] * 4097, "v": [], "cell_ext": False},
    {"k": "ab", "v": [], "cell_ext": False},
    {"k": [[1, 128]] * 2, "v": [[1, 128]], "cell_ext": False},
    {"k": [[1, 128, 0]], "v": [], "cell_ext": False},
    {"k": [128], "v": [], "cell_ext": False},
    {"k": [[1, 127]], "v": [], "cell_ext": False},
    {"k": [[1, 0]], "v": [], "cell_ext": False},
    {"k": [[1, -2]], "v": [], "cell_ext": False},
    {"k": [[1, 1 << 25]], "v": [], "cell_ext": False},
    {"k": [[1, 128.0]], "v": [], "cell_ext": False},
    {"k": [[True, 128]], "v": [], "cell_ext": False},
    {"k": [[12, 144]], "v": [], "cell_ext": False},
]


@pytest.mark.parametrize("value", BAD_LAYOUTS)
def test_bad_layout_json(value: object) -> None:
    """Anything else is refused."""
    with pytest.raises(StateError):
        KVLayout.from_json(value)
