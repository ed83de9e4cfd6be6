"""Labels of cells that share a position, on blobs that llama.cpp wrote."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from towerd.slots.blob import emit_blob, parse_rows
from towerd.slots.errors import StateError
from towerd.slots.labels import (
    Labels,
    head_at_places,
    head_of_tokens,
    label_places,
    label_tokens,
)
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import HeadRows, KVRows

F32 = 0
PLANE = Plane(F32, 16)
LAYOUT = KVLayout((PLANE,), (PLANE,), cell_ext=True)
PLACES = np.array([3, 4, 4, 4, 4, 4, 4, 7, 8], np.int32)
"""Text, a picture of 3 x 2, and text."""
X = np.array([3, 4, 5, 6, 4, 5, 6, 7, 8], np.int32)
Y = np.array([3, 4, 4, 4, 5, 5, 5, 7, 8], np.int32)
P0, N = 3, len(PLACES)


def rows() -> KVRows:
    """The rows of tokens [P0, P0 + N), numbered."""
    k, v = (
        (np.arange(N * 4, dtype=np.float32) + i).view(np.uint8).reshape(N, 16) for i in range(2)
    )
    ext = np.stack([X, Y, np.full(N, -1, np.int32)], axis=1)
    return KVRows(LAYOUT, np.arange(P0, P0 + N, dtype=np.int32), (k,), (v,), ext)


def blob(order: Labels | None = None) -> np.ndarray:
    """As llama.cpp has it, with the tokens in its cells in some order."""
    made = np.asarray(emit_blob([rows()])).copy()
    label_places(made, P0, PLACES)
    if order is None:
        return made
    cells = made[16 : 16 + 24 * N].reshape(N, 24)
    cells[:] = cells[order].copy()
    at = 16 + 24 * N + 8
    for _ in range(2):
        plane = made[at + 12 : at + 12 + 16 * N].reshape(N, 16)
        plane[:] = plane[order].copy()
        at += 12 + 16 * N
    return made


def position(made: np.ndarray) -> list[int]:
    return list(made[16 : 16 + 24 * N].view("<i4").reshape(N, 6)[:, 0])


def test_there_and_back() -> None:
    made = blob()
    assert position(made) == PLACES.tolist()
    label_tokens(made, P0, PLACES)
    assert bytes(made) == bytes(emit_blob([rows()]))


@pytest.mark.parametrize("seed", range(4))
def test_cells_in_any_order(seed: int) -> None:
    """Tokens of a picture are known by their row and column."""
    made = blob(np.random.default_rng(seed).permutation(N).astype(np.int32))
    label_tokens(made, P0, PLACES)
    found = parse_rows(made, cell_ext=True, layout=LAYOUT)
    assert np.array_equal(found.positions, rows().positions)
    assert np.array_equal(found.k[0], rows().k[0])
    assert found.ext is not None
    assert found.ext[:, :2].tolist() == np.stack([X, Y], axis=1).tolist()
    label_places(made, P0, PLACES)
    assert sorted(position(made)) == PLACES.tolist()


def test_what_is_refused() -> None:
    """Other places, other tokens, two cells that nothing tells apart, and what is no such blob."""
    with pytest.raises(StateError, match="other places"):
        label_tokens(blob(), P0, PLACES + 1)
    with pytest.raises(StateError, match="other places"):
        label_tokens(blob(), P0, PLACES[:-1])
    twice = blob()
    cells = twice[16 : 16 + 24 * N].reshape(N, 24)
    cells[3] = cells[2]
    with pytest.raises(StateError, match="same place"):
        label_tokens(twice, P0, PLACES)
    made = np.asarray(emit_blob([rows()])).copy()
    for wrong in ((P0 + 1, PLACES), (P0, PLACES[1:]), (P0 - 1, PLACES)):
        with pytest.raises(StateError, match="not those of the tokens"):
            label_places(made, *wrong)
    made[8] = 2
    with pytest.raises(StateError, match="unified"):
        label_places(made, P0, PLACES)


def test_rows_of_a_head_go_there_and_back() -> None:
    """Those of words; what shares a position is left out."""
    words = [0, 7, 8]
    own = rows()
    at_places = HeadRows(
        b"h" * 32,
        KVRows(
            LAYOUT,
            PLACES[words],
            tuple(plane[words] for plane in own.k),
            tuple(plane[words] for plane in own.v),
            None if own.ext is None else own.ext[words],
        ),
    )
    found = head_of_tokens(at_places, P0, PLACES)
    assert found is not None
    assert found.rows.positions.tolist() == [P0 + i for i in words]
    again = head_at_places(found, P0, PLACES)
    assert again.rows.positions.tolist() == PLACES[words].tolist()
    for mine, theirs in zip(again.rows.planes(), at_places.rows.planes(), strict=True):
        assert np.array_equal(mine, theirs)
    shared = replace(
        at_places, rows=replace(at_places.rows, positions=np.array([3, 4, 9], np.int32))
    )
    left = head_of_tokens(shared, P0, PLACES)
    assert left is not None
    assert left.rows.positions.tolist() == [P0]
    assert head_of_tokens(shared, P0, PLACES + 100) is None
