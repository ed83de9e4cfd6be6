"""Transform-coded rows: learned, written, read in ranges, and refused where they are damaged."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from towerd.codec.errors import CodecError, Damaged, NewerVersion, Truncated
from towerd.codec.rows import coded, learn
from towerd.codec.rows.basis import Basis, read_basis
from towerd.codec.rows.learn import Rounding, groups_of
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rope import LayerRope, Rope
from towerd.slots.rows import KVRows
from towerd.slots.shift import rotated, unrotated

N_LAYERS, WIDTH, HEAD = 4, 32, 16
ROPE = Rope(
    (LayerRope("norm", HEAD, HEAD), *[LayerRope("neox", HEAD, 8)] * 2, LayerRope("none", HEAD))
)
LAYOUT = KVLayout((Plane(1, 2 * WIDTH),) * N_LAYERS, (Plane(1, 2 * WIDTH),) * N_LAYERS)
CODINGS = {"near": Rounding(0.1, 0.05), "small": Rounding(0.5, 0.1, 0.05)}
IDENTITY = b"i" * 32
MIXING = np.random.default_rng(9).normal(size=(12, 2 * N_LAYERS * WIDTH))


def _rows(n: int, p0: int = 0, seed: int = 0) -> KVRows:
    """Rows whose un-rotated numbers are mixed from 12 sources, which are much the same in all planes."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(n, 12)) @ MIXING + 0.01 * random.normal(size=(n, MIXING.shape[1]))
    each = np.split((values + 3).astype(np.float16), 2 * N_LAYERS, axis=1)
    planes = [np.ascontiguousarray(plane).view(np.uint8) for plane in each]
    positions = np.arange(p0, p0 + n, dtype=np.int32)
    flat = KVRows(LAYOUT, positions, tuple(planes[:N_LAYERS]), tuple(planes[N_LAYERS:]))
    return rotated(flat, ROPE)


def _floats(rows: KVRows) -> np.ndarray:
    return np.stack([plane.view(np.float16).astype(np.float64) for plane in rows.planes()])


@pytest.fixture(scope="module")
def basis() -> Basis:
    samples = [_rows(400, 4, seed) for seed in (1, 2)]
    groups = groups_of(LAYOUT, 2)
    return learn.learn(samples, ROPE, CODINGS, row_identity=IDENTITY, groups=groups)


def test_keys_are_rotated_back_and_forth() -> None:
    rows = _rows(50, 1000)
    flat = unrotated(rows, ROPE)
    again = rotated(flat, ROPE)
    assert np.abs(_floats(again) - _floats(rows)).max() <= 2**-9 * np.abs(_floats(rows)).max()
    moved = unrotated(KVRows(LAYOUT, rows.positions + np.int32(7), rows.k, rows.v), ROPE)
    assert np.abs(_floats(moved)[0] - _floats(flat)[0]).max() > 1
    assert (_floats(moved)[3:] == _floats(flat)[3:]).all()  # no RoPE, and values


def test_an_angle_is_that_of_a_rotation_matrix() -> None:
    """A key at position 3, pair by pair, against complex numbers."""
    rows = _rows(1, 3)
    key = _floats(rows)[0, 0].reshape(-1, HEAD)
    turned = (key[:, ::2] + 1j * key[:, 1::2]) * np.exp(-3j * 10000 ** (-np.arange(8) / 8))
    found = _floats(unrotated(rows, ROPE))[0, 0].reshape(-1, HEAD)
    assert np.abs(found[:, ::2] - turned.real).max() < 0.02
    assert np.abs(found[:, 1::2] - turned.imag).max() < 0.02


@pytest.mark.parametrize(("coding", "bits"), [("near", 1.8), ("small", 1.35)])
def test_rows_that_are_alike_take_few_bits(basis: Basis, coding: str, bits: float) -> None:
    """12 numbers in each group of 64 are all there is, 7 bits each or 5; the rest is what pages have of their own."""
    rows = _rows(500, 70, seed=3)
    data = coded.encode(rows, basis, coding, ROPE)
    assert 8 * len(data) / (500 * MIXING.shape[1]) < bits
    read = coded.parse(data).read(70, 570, basis, ROPE)
    assert (read.positions == rows.positions).all()
    assert read.layout == LAYOUT
    errors = _floats(read) - _floats(rows)
    assert np.sqrt((errors**2).mean()) < CODINGS[coding].step


def test_it_pauses_between_groups_of_a_page(basis: Basis, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as their sizes ask for, and writes the same bytes: of a large model a page takes long."""
    rows = _rows(200, 10)
    whole = coded.encode(rows, basis, "near", ROPE)
    sizes, n_pages = [group.vectors.size * coded.PAGE_ROWS for group in basis.groups], 4
    for most, n_steps in (
        (1, n_pages * len(sizes)),
        (sum(sizes), n_pages),
        (2 * sum(sizes), n_pages // 2),
        (coded.PRODUCTS_OF_STEP, 1),
    ):
        monkeypatch.setattr(coded, "PRODUCTS_OF_STEP", most)
        asked = itertools.count()
        assert coded.encode(rows, basis, "near", ROPE, pause=partial(next, asked)) == whole
        assert next(asked) == n_steps - 1


class Busy(Exception):
    pass


def test_what_pause_raises_ends_it(basis: Basis, monkeypatch: pytest.MonkeyPatch) -> None:
    def pause() -> None:
        raise Busy

    monkeypatch.setattr(coded, "PRODUCTS_OF_STEP", 1)
    with pytest.raises(Busy):
        coded.encode(_rows(10), basis, "near", ROPE, pause=pause)


def test_a_range_is_what_the_whole_has_there(basis: Basis) -> None:
    data = coded.encode(_rows(200, 10), basis, "small", ROPE)
    parsed = coded.parse(data)
    assert (parsed.p0, parsed.p1, parsed.coding) == (10, 210, "small")
    whole = _floats(parsed.read(10, 210, basis, ROPE))
    for p0, p1 in ((10, 11), (73, 74), (60, 150), (209, 210)):
        part = parsed.read(p0, p1, basis, ROPE)
        assert part.positions.tolist() == list(range(p0, p1))
        assert (_floats(part) == whole[:, p0 - 10 : p1 - 10]).all()
    for p0, p1 in ((9, 20), (20, 20), (200, 211)):
        with pytest.raises(CodecError, match="no rows"):
            parsed.read(p0, p1, basis, ROPE)


def test_a_damaged_page_costs_its_rows(basis: Basis) -> None:
    data = bytearray(coded.encode(_rows(200), basis, "near", ROPE))
    parsed = coded.parse(bytes(data))
    data[len(data) - len(parsed.pages) + int(parsed.starts[1, 2]) + 50] ^= 4
    damaged = coded.parse(data)
    with pytest.raises(Damaged, match=r"\[64, 128\)"):
        damaged.read(0, 200, basis, ROPE)
    for p0, p1 in ((0, 64), (128, 200)):
        good = parsed.read(p0, p1, basis, ROPE)
        assert (_floats(damaged.read(p0, p1, basis, ROPE)) == _floats(good)).all()


def test_a_changed_head_is_refused(basis: Basis) -> None:
    data = coded.encode(_rows(100), basis, "near", ROPE)
    n_head = len(data) - len(coded.parse(data).pages)
    random = np.random.default_rng(0)
    for at in random.integers(0, n_head, 200):
        changed = bytearray(data)
        changed[at] ^= 1 << random.integers(8)
        with pytest.raises(CodecError):
            coded.parse(changed)
    for length in (0, 10, 63, 64, 70, n_head - 1, n_head, len(data) - 1):
        with pytest.raises(CodecError):
            coded.parse(data[:length])
    with pytest.raises(Truncated):
        coded.parse(data + b"\0")


def test_a_basis_is_read_as_it_was_written(basis: Basis) -> None:
    again = read_basis(basis.data)
    assert again.digest == basis.digest
    assert again.row_identity == IDENTITY
    rows = _rows(70)
    data = coded.encode(rows, again, "near", ROPE)
    assert data == coded.encode(rows, basis, "near", ROPE)
    read = coded.parse(data).read(0, 70, again, ROPE)
    assert (_floats(read) == _floats(coded.parse(data).read(0, 70, basis, ROPE))).all()


def test_the_order_of_codings_makes_no_difference(basis: Basis) -> None:
    """Two processes that name them in another order write the same basis, and the same rows."""
    samples, codings = [_rows(400, 4, seed) for seed in (1, 2)], dict(reversed(CODINGS.items()))
    groups = groups_of(LAYOUT, 2)
    other = learn.learn(samples, ROPE, codings, row_identity=IDENTITY, groups=groups)
    assert other.data == basis.data
    for name in CODINGS:
        assert coded.encode(_rows(70), other, name, ROPE) == coded.encode(
            _rows(70), basis, name, ROPE
        )


def test_pieces_are_cut_and_joined_page_by_page(basis: Basis) -> None:
    """The same bytes as if they had been written at once."""
    whole = coded.encode(_rows(300, 10), basis, "near", ROPE)
    parsed = coded.parse(whole)
    assert parsed.whole_pages(11, 300) == (74, 266)
    assert parsed.whole_pages(75, 100) == (138, 138)
    assert parsed.whole_pages(200, 310) == (202, 310)
    parts = [parsed.excerpt(*each) for each in ((10, 74), (74, 202), (202, 310))]
    assert coded.joined([coded.parse(part) for part in parts]) == whole
    with pytest.raises(CodecError):
        coded.joined([coded.parse(parts[0]), coded.parse(parts[2])])


def test_a_changed_basis_is_refused(basis: Basis) -> None:
    random = np.random.default_rng(1)
    for at in (*range(34), *random.integers(0, basis.nbytes, 50)):
        changed = bytearray(basis.data)
        changed[at] ^= 1 << random.integers(8)
        with pytest.raises((Damaged, NewerVersion)):
            read_basis(bytes(changed))
    for length in (0, 31, 32, 400, basis.nbytes - 1):
        with pytest.raises(CodecError):
            read_basis(basis.data[:length])


@pytest.mark.parametrize(
    "change",
    [
        lambda b: replace(b, groups=b.groups[:-1]),
        lambda b: replace(b, groups=(b.groups[0], *b.groups[:-1])),
        lambda b: replace(
            b,
            codings={"near": replace(b.codings["near"], classes=b.codings["near"].classes[:-1])},
        ),
        lambda b: replace(b, codings={"near": replace(b.codings["near"], step=float("nan"))}),
        lambda b: replace(
            b,
            groups=(
                replace(b.groups[0], mean=b.groups[0].mean * np.float32(np.inf)),
                *b.groups[1:],
            ),
        ),
    ],
    ids=["a group less", "a group twice", "classes of a group less", "no step", "no mean"],
)
def test_a_basis_that_cannot_be_used_is_refused(
    basis: Basis, change: Callable[[Basis], Basis]
) -> None:
    """Its checksum holds."""
    with pytest.raises(Damaged, match="cannot be used"):
        read_basis(change(basis).data)


def test_rows_of_another_basis_or_layout_are_refused(basis: Basis) -> None:
    rows = _rows(80)
    other = learn.learn(
        [_rows(300, 4, 5)], ROPE, CODINGS, row_identity=IDENTITY, groups=groups_of(LAYOUT, 1)
    )
    parsed = coded.parse(coded.encode(rows, basis, "near", ROPE))
    with pytest.raises(CodecError, match="another basis"):
        parsed.read(0, 80, other, ROPE)
    half = KVLayout(LAYOUT.k[:2], LAYOUT.v[:2])
    rope = Rope(ROPE.layers[:2])
    with pytest.raises(CodecError, match="another model"):
        coded.encode(KVRows(half, rows.positions, rows.k[:2], rows.v[:2]), basis, "near", rope)
    with pytest.raises(StateError):
        coded.encode(rows, basis, "near", rope)
    holes = KVRows(LAYOUT, rows.positions * np.int32(2), rows.k, rows.v)
    with pytest.raises(CodecError, match="holes"):
        coded.encode(holes, basis, "near", ROPE)
    rows.v[0].view(np.float16)[5, 5] = np.nan
    with pytest.raises(CodecError, match="not finite"):
        coded.encode(rows, basis, "near", ROPE)


def test_too_few_rows_make_no_basis() -> None:
    with pytest.raises(CodecError, match="takes more than"):
        learn.learn([_rows(50)], ROPE, CODINGS, row_identity=IDENTITY, groups=groups_of(LAYOUT, 4))


def test_a_weight_moves_bits_to_its_plane() -> None:
    """Values of the last layer that weigh ten times as much have a tenth of the error or so."""
    samples = [_rows(400, 4, seed) for seed in (1, 2)]
    found = {}
    for weight in (1.0, 10.0):
        weights = [1.0] * (2 * N_LAYERS - 1) + [weight]
        basis = learn.learn(
            samples,
            ROPE,
            {"small": Rounding(0.5)},
            row_identity=IDENTITY,
            groups=groups_of(LAYOUT, 1),
            weights=weights,
        )
        rows = _rows(300, 0, seed=3)
        read = coded.parse(coded.encode(rows, basis, "small", ROPE)).read(0, 300, basis, ROPE)
        found[weight] = np.abs(_floats(read) - _floats(rows)).mean(axis=(1, 2))
    assert found[10.0][-1] < found[1.0][-1] / 3
    assert found[10.0][0] == pytest.approx(found[1.0][0])


def test_groups_are_of_consecutive_layers() -> None:
    assert groups_of(LAYOUT, 3) == ((0, 1, 2), (3,), (4, 5, 6), (7,))
    assert groups_of(KVLayout(LAYOUT.k, ()), 9) == ((0, 1, 2, 3),)
    windowed = KVLayout(LAYOUT.k, LAYOUT.v, n_window=3)
    assert groups_of(windowed, 2) == ((0,), (1, 2), (3,), (4,), (5, 6), (7,))


def test_tables_add_up() -> None:
    counts = np.zeros(64, np.int64)
    assert learn.table_of(counts).sum() == 1 << 14
    counts[31], counts[30] = 10**9, 1
    table = learn.table_of(counts)
    assert table.sum() == 1 << 14
    assert table[30] == 1
    assert table[29] == 0
    assert learn.table_of(np.arange(64)).sum() == 1 << 14
