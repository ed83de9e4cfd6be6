"""Blobs of real llama.cpp contexts: byte-exact both ways, and exact logits after a restore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from towerd.kernels.formats import BY_TYPE, CACHE_FORMATS
from towerd.slots.blob import blob_size, emit_blob, parse_blob
from towerd.slots.errors import StateError
from towerd.slots.rows import delta, join
from towerd.slots.selftest import self_test

Ids = npt.NDArray[np.int32]
OpenContext = Callable[..., Any]

KINDS = sorted(
    {
        (row.ggml_type, v, v_trans)
        for row in CACHE_FORMATS
        for v, v_trans in ((row.ggml_type, False), (1, True), (row.ggml_type, True))
        if not (v_trans and BY_TYPE[v].is_quantized)  # llama.cpp refuses it
    }
)
N = 40


def _options(kind: tuple[int, int, bool], unified: bool) -> dict[str, Any]:
    k, v, v_trans = kind
    return {"k": k, "v": v, "v_trans": v_trans, "unified": unified, "n_seq": 8 if unified else 3}


def _name(kind: tuple[int, int, bool]) -> str:
    return f"{BY_TYPE[kind[0]].name}-{BY_TYPE[kind[1]].name}-{'trans' if kind[2] else 'plain'}"


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("kind", KINDS, ids=_name)
def test_round_trip_and_restore(
    open_context: OpenContext, ids: Ids, kind: tuple[int, int, bool], unified: bool
) -> None:
    """Parsed and emitted bytes equal llama.cpp's; composed parts restore to exact logits."""
    options = _options(kind, unified)
    context = open_context(**options)
    seq = 1
    context.decode(ids[:N], 0, seq)
    blob = context.blob(seq)
    state = parse_blob(blob)
    assert state.to_bytes() == blob
    assert (state.frame.n_stream, state.frame.stream) == ((1, 0) if unified else (3, seq))
    assert (state.frame.v_trans, state.frame.seq_id, state.order) == (kind[2], seq, None)
    assert [plane.ggml_type for plane in state.rows.layout.k] == [kind[0]] * 2
    assert [plane.ggml_type for plane in state.rows.layout.v] == [kind[1]] * 2
    self_test(blob, np.arange(N), state.rows.layout)

    frame: dict[str, Any] = {"n_stream": state.frame.n_stream, "v_trans": state.frame.v_trans}
    cuts = [0, 1, 13, 14, N]
    parts = [state.rows.slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    composed = emit_blob(parts, stream=state.frame.stream, seq_id=seq, **frame)
    assert bytes(composed) == blob
    other = open_context(**options)
    assert other.restore(emit_blob(parts, seq_id=5, **frame), 0)
    expected = context.decode(ids[N : N + 3], N, seq)
    assert np.array_equal(other.decode(ids[N : N + 3], N, 0), expected)


@pytest.mark.parametrize("kind", KINDS, ids=_name)
def test_permuted_cells(open_context: OpenContext, ids: Ids, kind: tuple[int, int, bool]) -> None:
    """Cells out of order come out in position order, keep their bytes, and restore exactly."""
    options = _options(kind, True)
    source = open_context(**options)
    source.decode(ids[:N], 0)
    straight = parse_blob(source.blob())
    rows = straight.rows
    frame: dict[str, Any] = {"v_trans": straight.frame.v_trans}
    scattered = open_context(**options)
    for part, (p0, p1) in enumerate([(30, 40), (5, 12), (0, 5), (12, 30)], start=1):
        scattered.decode(ids[part : part + 1], part - 1, 7)  # a foreign cell in between
        assert scattered.restore(emit_blob([rows.slice(p0, p1)], **frame), part)
        scattered.copy(part, 0)
        scattered.remove(part)
    blob = scattered.blob(0)
    state = parse_blob(blob)
    assert state.order is not None
    assert state.to_bytes() == blob
    assert state.rows.positions.tolist() == list(range(N))
    composed = emit_blob(state.rows.split(17), **frame)
    assert bytes(composed) == straight.to_bytes()
    restored = open_context(**options)
    assert restored.restore(composed)
    expected = source.decode(ids[N : N + 2], N)
    assert np.array_equal(restored.decode(ids[N : N + 2], N), expected)


def test_interleaved_sequences(open_context: OpenContext, ids: Ids) -> None:
    """Sequences that grew into each other's holes round-trip byte for byte."""
    context = open_context()
    context.decode(ids[:20], 0, 0)
    context.decode(ids[:10], 0, 1)
    context.decode(ids[20:25], 20, 0)
    context.remove(0, 5, 12)
    context.decode(ids[10:20], 10, 1)
    context.copy(0, 2, 0, 18)
    context.decode(ids[25:40], 25, 0)
    orders = []
    for seq in range(3):
        blob = context.blob(seq)
        state = parse_blob(blob)
        assert state.to_bytes() == blob
        self_test(blob, state.rows.positions, state.rows.layout)
        orders.append(state.order)
    assert any(order is not None for order in orders)
    holed = parse_blob(context.blob(0)).rows
    assert holed.positions.tolist() == [*range(5), *range(12, 40)]
    assert not holed.is_consecutive


def test_streams_with_holes(open_context: OpenContext, ids: Ids) -> None:
    """A hole in a stream is filled by later positions; the order survives."""
    context = open_context(unified=False, n_seq=3)
    context.decode(ids[:20], 0, 2)
    context.remove(2, 5, 10)
    context.decode(ids[20:30], 20, 2)
    blob = context.blob(2)
    state = parse_blob(blob)
    assert (state.frame.n_stream, state.frame.stream) == (3, 2)
    assert state.order is not None
    assert state.to_bytes() == blob


@pytest.mark.parametrize("model", ["mrope", "mla"])
@pytest.mark.parametrize("v_trans", [False, True])
def test_other_memories(open_context: OpenContext, ids: Ids, model: str, v_trans: bool) -> None:
    """Cells with an extension (M-RoPE) and caches without V (MLA)."""
    context = open_context(model, v_trans=v_trans)
    context.decode(ids[:N], 0)
    blob = context.blob()
    cell_ext = model == "mrope"
    state = parse_blob(blob, cell_ext=cell_ext)
    assert state.to_bytes() == blob
    assert len(state.rows.layout.v) == (2 if model == "mrope" else 0)
    if state.rows.ext is not None:
        assert state.rows.ext[:, 2].tolist() == ids[:N].tolist()
    with pytest.raises(StateError):
        parse_blob(blob, cell_ext=not cell_ext)
    composed = emit_blob(state.rows.split(9), v_trans=v_trans)
    assert bytes(composed) == blob
    other = open_context(model, v_trans=v_trans)
    assert other.restore(composed)
    expected = context.decode(ids[N : N + 1], N)
    assert np.array_equal(other.decode(ids[N : N + 1], N), expected)


def test_split_at_every_point(open_context: OpenContext, ids: Ids) -> None:
    """Any two halves compose, and join, to the whole; the delta is the second half."""
    context = open_context(k=8, v=8)
    context.decode(ids[:N], 0)
    blob = context.blob()
    rows = parse_blob(blob).rows
    out = bytearray(blob_size(rows.layout, N) + 100)
    for at in range(1, N):
        first, second = rows.split(at)
        view = emit_blob([first, second], out=out)
        assert bytes(view) == blob
        assert bytes(emit_blob([join([first, second])])) == blob
        assert delta(rows, at).positions.tolist() == second.positions.tolist()
        assert parse_blob(bytes(emit_blob([second]))).rows.p0 == at


def test_frames_are_interchangeable(open_context: OpenContext, ids: Ids) -> None:
    """Rows of one kind of context restore into any other that has the same types."""
    source = open_context(v_trans=True, unified=False, n_seq=3)
    source.decode(ids[:N], 0, 1)
    rows = parse_blob(source.blob(1)).rows
    plain = open_context()
    assert plain.restore(emit_blob([rows]))
    again = parse_blob(plain.blob())
    assert all(map(np.array_equal, again.rows.planes(), rows.planes()))
    assert not plain.restore(emit_blob([rows], v_trans=True))
    assert not plain.restore(emit_blob([rows], n_stream=2))


def test_rows_are_views(open_context: OpenContext, ids: Ids) -> None:
    """Sorted cells with plain V are not copied."""
    context = open_context()
    context.decode(ids[:N], 0)
    blob = np.frombuffer(context.blob(), np.uint8)
    rows = parse_blob(blob).rows
    assert all(np.shares_memory(plane, blob) for plane in rows.planes())
    assert all(np.shares_memory(plane, blob) for plane in rows.slice(3, 9).planes())


def test_empty_sequence(open_context: OpenContext) -> None:
    """A state without cells is an error: llama.cpp would not even clear its destination."""
    with pytest.raises(StateError, match="no cells"):
        parse_blob(open_context().blob(3))
