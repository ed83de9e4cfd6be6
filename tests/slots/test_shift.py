"""Moving rows: what moves, what stays, compositions of moves, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roped import keys_of, relative

from towerd.kernels import dispatch
from towerd.kernels.formats import BY_NAME
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rope import LayerRope, Rope
from towerd.slots.rows import KVRows, join
from towerd.slots.shift import compose_at, shift

NORM = LayerRope("norm", 64, 64)
NEOX = LayerRope("neox", 64, 16, freq_base=500000.0)
NONE = LayerRope("none", 64)
LATENT = LayerRope("norm", 96, 32, first=64)
MULTI = LayerRope("neox", 64, 64, sections=(16, 8, 8, 0))
ROUNDING = {"f32": 1e-6, "f16": 2**-10, "bf16": 2**-7, "q8_0": 0.012, "q4_0": 0.2}
"""RMS that one rounding or two may leave, relative to the keys' own."""


def make_rows(
    rope: Rope,
    n: int = 5,
    at: int = 10,
    k: str = "f16",
    *,
    heads: int = 2,
    has_v: bool = True,
    seed: int = 0,
) -> KVRows:
    """Random rows of unit variance that fit `rope`; V is f16."""
    random = np.random.default_rng(seed)

    def plane(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
        return dispatch.transcoded(values.view(np.uint8), "f32", name)

    def draw(elements: int) -> npt.NDArray[np.float32]:
        return random.standard_normal((n, elements), np.float32)

    keys = tuple(plane(k, draw(layer.head_dim * heads)) for layer in rope.layers)
    values = tuple(plane("f16", draw(64)) for _ in rope.layers) if has_v else ()
    layout = KVLayout(
        tuple(Plane(BY_NAME[k].ggml_type, key.shape[1]) for key in keys),
        tuple(Plane(1, value.shape[1]) for value in values),
        cell_ext=rope.is_multi,
    )
    positions = np.arange(at, at + n, dtype=np.int32)
    ext = np.stack([positions, positions, positions * 7], axis=1) if rope.is_multi else None
    return KVRows(layout, positions, keys, values, ext)


@settings(deadline=None)
@given(
    st.sampled_from([NORM, NEOX, LATENT, MULTI]),
    st.sampled_from(sorted(ROUNDING)),
    st.integers(0, 3000),
    st.lists(st.integers(0, 3000), min_size=1, max_size=4),
)
def test_moves_add_up(layer: LayerRope, k: str, at: int, stops: list[int]) -> None:
    """Any sequence of moves ends where the direct move does, but for one rounding at each stop."""
    rope = Rope((layer,))
    rows = make_rows(rope, at=at, k=k, has_v=layer is not LATENT)
    moved = rows
    for stop in stops:
        moved = shift(moved, stop, rope)
    direct = shift(rows, stops[-1], rope)
    assert np.array_equal(moved.positions, direct.positions)
    rms, _ = relative(keys_of(moved, 0) - keys_of(direct, 0), keys_of(direct, 0))
    assert rms <= ROUNDING[k] * len(stops)


@settings(deadline=None)
@given(st.sampled_from(sorted(ROUNDING)), st.integers(0, 100_000), st.integers(0, 100_000))
def test_there_and_back(k: str, at: int, to: int) -> None:
    """Rotations keep lengths: a move and its inverse leave the keys but for two roundings."""
    rope = Rope((NORM,))
    rows = make_rows(rope, at=at, k=k)
    back = shift(shift(rows, to, rope, rot_k=True), at, rope, rot_k=True)
    assert np.array_equal(back.positions, rows.positions)
    rms, _ = relative(keys_of(back, 0) - keys_of(rows, 0), keys_of(rows, 0))
    assert rms <= ROUNDING[k] * 2


@pytest.mark.parametrize("k", sorted(ROUNDING))
def test_not_moving_is_the_same_bytes(k: str) -> None:
    rope = Rope((NORM, NEOX))
    rows = make_rows(rope, k=k)
    assert shift(rows, rows.p0, rope) is rows


def test_only_keys_that_rotate_are_new() -> None:
    """V, and K of layers without RoPE, are the very arrays; so are elements beyond n_rot."""
    rope = Rope((NORM, NONE, NEOX))
    rows = make_rows(rope)
    moved = shift(rows, 500, rope)
    assert moved.v is rows.v
    assert moved.k[1] is rows.k[1]
    assert not np.array_equal(moved.k[0], rows.k[0])
    before, after = (keys_of(r, 2).reshape(5, 2, 64) for r in (rows, moved))
    assert np.array_equal(before[:, :, 16:], after[:, :, 16:])
    assert not np.array_equal(before[:, :, :16], after[:, :, :16])


def test_mla_rotates_the_end_of_the_row_and_has_no_hadamard() -> None:
    """Its quantized keys are stored plain, whatever the cache's flag says."""
    rope = Rope((LATENT,))
    rows = make_rows(rope, has_v=False, heads=1)
    before, after = keys_of(rows, 0), keys_of(shift(rows, 900, rope), 0)
    assert np.array_equal(before[:, :64], after[:, :64])
    assert not np.array_equal(before[:, 64:], after[:, 64:])
    wide = Rope((LayerRope("norm", 128, 64, first=64),))
    quantized = make_rows(wide, k="q8_0", has_v=False, heads=1)
    plain, flagged = (shift(quantized, 900, wide, rot_k=flag) for flag in (False, True))
    assert np.array_equal(plain.k[0], flagged.k[0])
    with_v = make_rows(wide, k="q8_0", heads=1)
    assert not np.array_equal(
        shift(with_v, 900, wide).k[0], shift(with_v, 900, wide, rot_k=True).k[0]
    )


def test_positions_of_m_rope_cells_move() -> None:
    rope = Rope((MULTI,))
    rows = make_rows(rope)
    moved = shift(rows, 700, rope)
    assert moved.ext is not None
    assert moved.ext[:, 0].tolist() == moved.ext[:, 1].tolist() == list(range(700, 705))
    assert rows.ext is not None
    assert np.array_equal(moved.ext[:, 2], rows.ext[:, 2])
    assert rows.ext[0, 0] == 10


def test_gaps_between_positions_stay() -> None:
    rope = Rope((NORM,))
    whole = make_rows(rope, n=9)
    holed = replace(
        whole,
        positions=np.array([3, 4, 9], np.int32),
        k=(whole.k[0][[0, 4, 8]],),
        v=(whole.v[0][::4],),
    )
    assert shift(holed, 0, rope).positions.tolist() == [0, 1, 6]
    with pytest.raises(StateError, match="holes"):
        compose_at([holed], rope)


def test_views_need_no_copy() -> None:
    """Rows that lie apart in memory move as contiguous ones do."""
    rope = Rope((NORM, NEOX))
    rows = make_rows(rope, n=6)
    apart = replace(
        rows,
        k=tuple(np.repeat(plane, 2, axis=0)[::2] for plane in rows.k),
    )
    assert apart.k[0].strides[0] == 2 * rows.k[0].strides[0]
    for mine, theirs in zip(shift(apart, 77, rope).k, shift(rows, 77, rope).k, strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("start", [0, 40])
def test_compose_at(start: int) -> None:
    """Parts from any position are put after one another; parts already in place are not touched."""
    rope = Rope((NORM, NEOX))
    parts = [make_rows(rope, n=n, at=at, seed=n) for n, at in ((4, start), (7, 900), (1, 3))]
    tower = compose_at(parts, rope, start=start)
    assert tower[0] is parts[0]
    assert [part.p0 - start for part in tower] == [0, 4, 11]
    assert join(tower).positions.tolist() == list(range(start, start + 12))
    alone = shift(parts[1], start + 4, rope)
    assert all(map(np.array_equal, tower[1].k, alone.k))


def test_bad_input_is_refused() -> None:
    rope = Rope((NORM, NEOX))
    rows = make_rows(rope)
    refuse("cannot begin at position -1", rows, -1, rope)
    refuse("cannot begin", rows, (1 << 31) - 5, rope)
    assert shift(rows, (1 << 31) - 6, rope).p1 == (1 << 31) - 1
    refuse("1 layers, the cache 2", rows, 0, Rope((NORM,)))
    refuse("whole heads", rows, 0, Rope((NORM, LayerRope("neox", 48, 48))))
    refuse("extension", rows, 0, Rope((MULTI, MULTI)))
    refuse("extension", make_rows(Rope((MULTI,))), 0, Rope((NORM,)))
    broken = make_rows(rope, k="q8_0")
    broken.k[0][2, :2] = 0xFF  # the scale of a block is no number
    refuse("cannot be rotated", broken, 0, rope)
    stored = replace(
        rows,
        layout=KVLayout(tuple(Plane(BY_NAME["q8"].type_id, 136) for _ in range(2)), rows.layout.v),
        k=tuple(np.zeros((5, 136), np.uint8) for _ in range(2)),
    )
    refuse("stored format q8", stored, 0, rope)


def refuse(message: str, rows: KVRows, to: int, rope: Rope) -> None:
    with pytest.raises(StateError, match=message):
        shift(rows, to, rope)


def test_bad_towers_are_refused() -> None:
    rope = Rope((NORM,))
    rows = make_rows(rope)
    bad: list[tuple[Sequence[KVRows], str]] = [
        ([], "no rows"),
        ([rows, make_rows(rope, k="f32")], "different layouts"),
    ]
    for parts, message in bad:
        with pytest.raises(StateError, match=message):
            compose_at(parts, rope)
