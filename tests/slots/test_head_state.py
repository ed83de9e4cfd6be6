"""HeadState: blobs of heads' contexts, read without being told what they hold, and written again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from towerd.slots.errors import StateError
from towerd.slots.head_state import HeadState, read_head_state
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import KVRows

F16, F32, Q8_0 = 1, 0, 8
K, V, QUANTIZED = Plane(F16, 32), Plane(F32, 16), Plane(Q8_0, 34)
NONE = KVLayout((), ())
ONE = KVLayout((K,), (V,))
STATES = {
    "one cache": HeadState((ONE,), v_trans=False),
    "two layers": HeadState((KVLayout((K, K), (V, V)),), v_trans=False),
    "transposed V": HeadState((ONE,), v_trans=True),
    "without V": HeadState((KVLayout((QUANTIZED,), ()),), v_trans=False),
    "quantized": HeadState((KVLayout((QUANTIZED,), (QUANTIZED,)),), v_trans=False),
    "M-RoPE": HeadState((replace(ONE, cell_ext=True),), v_trans=False),
    "no window": HeadState((ONE, NONE), v_trans=False),
    "window alone": HeadState((NONE, ONE), v_trans=True),
    "both": HeadState((ONE, KVLayout((V,), (K,))), v_trans=False),
}


def rows_of(layout: KVLayout, positions: list[int], seed: int = 0) -> KVRows:
    rng = np.random.default_rng(seed)
    n = len(positions)
    planes = [rng.integers(0, 256, (n, plane.row_bytes), np.uint8) for plane in layout.planes]
    ext = rng.integers(0, 99, (n, 3)).astype(np.int32) if layout.cell_ext else None
    k, v = tuple(planes[: layout.n_layer]), tuple(planes[layout.n_layer :])
    return KVRows(layout, np.array(positions, np.int32), k, v, ext)


@pytest.mark.parametrize("kind", list(STATES))
def test_what_is_read_is_what_was_written(kind: str) -> None:
    """Also of positions with gaps."""
    state = STATES[kind]
    probe = state.emit(rows_of(state.layout, [0, 1], 1), seq_id=3)
    found = read_head_state(probe)
    assert (found.layout, found.v_trans) == (state.layout, state.v_trans)
    assert len(found.caches) == len(state.caches)
    for positions in ([0], list(range(40)), [3, 4, 5, 9, 10]):
        rows = rows_of(state.layout, positions)
        again = found.parse(found.emit(rows))
        assert again.positions.tolist() == positions
        for mine, theirs in zip(again.planes(), rows.planes(), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        if rows.ext is not None:
            np.testing.assert_array_equal(again.ext, rows.ext)


@pytest.mark.parametrize("kind", list(STATES))
def test_a_blob_that_is_cut_off_is_refused(kind: str) -> None:
    state = STATES[kind]
    blob = state.emit(rows_of(state.layout, [0, 1, 2]))
    for n in range(len(blob)):
        with pytest.raises(StateError):
            state.parse(blob[:n])
    with pytest.raises(StateError):
        state.parse(np.append(blob, np.uint8(0)))


def test_another_head_is_refused() -> None:
    state, other = STATES["one cache"], STATES["quantized"]
    with pytest.raises(StateError, match="another head"):
        state.emit(rows_of(other.layout, [0]))
    with pytest.raises(StateError, match="another layout"):
        state.parse(other.emit(rows_of(other.layout, [0])))


def test_a_state_of_another_form_is_not_guessed_at() -> None:
    blob = STATES["one cache"].emit(rows_of(ONE, [0, 1]))
    with pytest.raises(StateError, match="not known"):
        read_head_state(np.append(blob, np.zeros(12, np.uint8)))
    with pytest.raises(StateError, match="not known"):
        read_head_state(np.zeros(100, np.uint8))
    empty = HeadState((NONE,), v_trans=False)
    with pytest.raises(StateError, match="not known"):
        read_head_state(empty.emit(rows_of(NONE, [0])))
