"""Blobs for llama.cpp: handed on as they are or joined, the rows are the same."""

from __future__ import annotations

import tracemalloc
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_tools import rows_of
from waiting import until

from towerd.slots.blob import emit_blob, parse_blob, parse_rows
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import KVRows, join
from towerd.slots.runs import Runs
from towerd.store import Node, RowsPart
from towerd.store.rows.rows_part import Tier
from towerd.tiers.composer import BLOB_BYTES, Composer, Piece
from towerd.tiers.plan import Composed

LAYOUT = KVLayout((Plane(1, 16),) * 2, (Plane(1, 32),) * 2)
IDS = np.arange(60, dtype=np.int32)
NODE = Node.__new__(Node)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs of at most 8 rows; one of 5 is worth attaching by itself."""
    monkeypatch.setattr("towerd.tiers.composer.BLOB_BYTES", 8 * LAYOUT.token_bytes)
    monkeypatch.setattr("towerd.tiers.composer.DIRECT_BYTES_MIN", 5 * LAYOUT.token_bytes)


def pieces_of(edges: list[int], *, v_trans: bool, as_blobs: bool) -> list[Piece]:
    """The rows of IDS, cut at `edges`, each from a tier of its own."""
    found = []
    for number, (a, b) in enumerate(pairwise([0, *edges, 60])):
        rows = rows_of(IDS[:b], a, LAYOUT)
        if as_blobs:
            rows = parse_rows(emit_blob([rows], v_trans=v_trans), layout=LAYOUT)
        tier: Tier = "warm" if number % 3 else "hot"
        part = RowsPart(NODE, a, b, tier, Runs.of(rows))
        found.append((part, rows))
    return found


def together(blobs: list[Composed]) -> KVRows:
    return join([parse_blob(each.blob, layout=LAYOUT).rows for each in blobs])


@given(
    cuts=st.sets(st.integers(1, 59), max_size=8),
    v_trans=st.booleans(),
    wants=st.booleans(),
    as_blobs=st.booleans(),
)
@settings(deadline=None)
def test_composed_rows_are_the_rows(
    cuts: set[int], v_trans: bool, wants: bool, as_blobs: bool
) -> None:
    """Whatever form they are in and the context has: each blob frames as the context wants."""
    composer = Composer(LAYOUT, v_trans=wants, tail=b"")
    pieces = pieces_of(sorted(cuts), v_trans=v_trans, as_blobs=as_blobs)
    blobs = list(composer.blobs(pieces))
    rows = together(blobs)
    expected = rows_of(IDS, 0, LAYOUT)
    assert rows.positions.tolist() == expected.positions.tolist()
    assert all(map(np.array_equal, rows.planes(), expected.planes()))
    assert {parse_blob(each.blob).frame.v_trans for each in blobs} == {wants}
    assert sum(each.n_hot for each in blobs) == sum(
        part.p1 - part.p0 for part, _ in pieces if part.tier == "hot"
    )
    direct = [each for each in blobs if each.buffer is None]
    fit = [len(rows) >= 5 and as_blobs and v_trans == wants for _, rows in pieces]
    assert len(direct) == sum(fit)
    for each in blobs:
        assert each.n == each.n_hot + each.n_warm == len(each.provenance)
        assert each.buffer is None or each.n <= 8
        composer.recycle(each)


def test_a_tail_needs_room_of_its_own() -> None:
    """A blob that must end with something else cannot be a view of a file."""
    composer = Composer(LAYOUT, v_trans=True, tail=b"state")
    blobs = list(composer.blobs(pieces_of([30], v_trans=True, as_blobs=True)))
    assert all(each.buffer is not None for each in blobs)
    assert all(bytes(each.blob[-5:]) == b"state" for each in blobs)


def test_keys_alone_are_joined() -> None:
    """Without V nothing in the rows tells how their blob says that V is kept."""
    layout = KVLayout((Plane(1, 160),), ())
    blob = emit_blob([rows_of(IDS, 0, layout)], layout=layout)
    rows = parse_rows(blob, layout=layout)
    composer = Composer(layout, v_trans=True, tail=b"")
    part = RowsPart(NODE, 0, 60, "warm", Runs.of(rows))
    assert all(each.buffer is not None for each in composer.blobs([(part, rows)]))


def test_an_idle_daemon_reserves_what_its_longest_conversation_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing for one that is less than a blob; never more than three blobs; nothing twice."""
    monkeypatch.setattr("towerd.tiers.composer.BLOB_BYTES", BLOB_BYTES)
    composer = Composer(LAYOUT, v_trans=False, tail=b"")
    n_blob = -(-BLOB_BYTES // LAYOUT.token_bytes)

    def has_blobs(n: int) -> bool:
        return tracemalloc.get_traced_memory()[0] // BLOB_BYTES == n

    tracemalloc.start()
    try:
        for n_tokens, n_blobs in ((0, 0), (n_blob - 1, 0), (2 * n_blob, 2), (10**9, 3), (10**9, 3)):
            composer.reserve(n_tokens)
            until(partial(has_blobs, n_blobs))
    finally:
        tracemalloc.stop()
