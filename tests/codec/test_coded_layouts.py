"""Transform-coded rows of every kind of cache: types, rotations, windows, latents, heads of several widths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from towerd.codec.errors import CodecError, Damaged
from towerd.codec.rows import coded
from towerd.codec.rows.basis import Basis, read_basis
from towerd.codec.rows.learn import Rounding, groups_of, learn
from towerd.kernels import dispatch
from towerd.kernels.formats import BY_NAME
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rope import LayerRope, Rope
from towerd.slots.rows import KVRows
from towerd.slots.shift import rotated
from towerd.tiers.formats.calibration import stored

HEAD = 64
CODINGS = {"fine": Rounding(0.05)}
N_SOURCES = 12


def _planes(type_name: str, *widths: int) -> tuple[Plane, ...]:
    found = BY_NAME[type_name]
    return tuple(Plane(found.type_id, found.row_bytes(width)) for width in widths)


def _dense(k: str, v: str, *, n_window: int = 0, cell_ext: bool = False) -> KVLayout:
    return KVLayout(_planes(k, 128, 128, 128), _planes(v, 128, 128, 128), cell_ext, n_window)


NEOX = (LayerRope("neox", HEAD, HEAD),) * 3
MULTI = replace(NEOX[0], sections=(16, 8, 8, 0))
CASES = {
    "f16": (_dense("f16", "f16"), Rope(NEOX)),
    "bf16": (_dense("bf16", "bf16"), Rope(NEOX)),
    "f32": (_dense("f32", "f32"), Rope(NEOX)),
    "f32 keys": (_dense("f32", "f16"), Rope(NEOX)),
    "q8_0": (_dense("q8_0", "q8_0"), Rope(NEOX)),
    "q8_0 keys": (_dense("q8_0", "f16"), Rope(NEOX)),
    "q5_1 values": (_dense("f16", "q5_1"), Rope(NEOX)),
    "part of a head": (_dense("f16", "f16"), Rope((LayerRope("norm", HEAD, 16),) * 3)),
    "no rotation": (_dense("f16", "f16"), Rope((LayerRope("none", HEAD), *NEOX[1:]))),
    "windows": (_dense("f16", "f16", n_window=2), Rope(NEOX, 2)),
    "M-RoPE": (_dense("f16", "f16", cell_ext=True), Rope((MULTI,) * 3)),
    "interleaved M-RoPE": (
        _dense("f16", "f16", cell_ext=True),
        Rope((replace(MULTI, interleaved=True),) * 3),
    ),
    "latents": (
        KVLayout(_planes("f16", 96, 96, 96), ()),
        Rope((LayerRope("norm", 96, 32, first=64),) * 3),
    ),
    "heads by layer": (
        KVLayout(_planes("f16", 64, 256, 128), _planes("f16", 64, 256, 128)),
        Rope(NEOX),
    ),
}


def _flat(n: int, layout: KVLayout, seed: int) -> list[np.ndarray]:
    """Un-rotated float32 planes, mixed from a few sources that are much the same in all of them."""
    mixing, random = np.random.default_rng(9), np.random.default_rng(seed)
    sources = random.normal(size=(n, N_SOURCES))
    return [
        (sources @ mixing.normal(size=(N_SOURCES, plane.n_elements)) + 3).astype(np.float32)
        for plane in layout.planes
    ]


def _rows(n: int, layout: KVLayout, rope: Rope, p0: int = 0, seed: int = 0) -> KVRows:
    """Rows as a cache has them: rotated in f32, then in its types."""
    wide = replace(
        layout,
        k=_planes("f32", *(plane.n_elements for plane in layout.k)),
        v=_planes("f32", *(plane.n_elements for plane in layout.v)),
    )
    planes = [plane.view(np.uint8) for plane in _flat(n, layout, seed)]
    positions = np.arange(p0, p0 + n, dtype=np.int32)
    ext = None
    if layout.cell_ext:  # text behind a picture that takes 5 places less than tokens
        ext = np.stack([positions - 5, positions - 5, positions * 7], axis=1).astype(np.int32)
    cut = layout.n_layer
    turned = rotated(KVRows(wide, positions, tuple(planes[:cut]), tuple(planes[cut:]), ext), rope)
    typed = [
        dispatch.transcoded(plane, "f32", to.format.name)
        for plane, to in zip(turned.planes(), layout.planes, strict=True)
    ]
    return KVRows(layout, positions, tuple(typed[:cut]), tuple(typed[cut:]), ext)


def _floats(rows: KVRows) -> np.ndarray:
    return np.concatenate(
        [
            dispatch.transcoded(plane, of.format.name, "f32").view(np.float32)
            for plane, of in zip(rows.planes(), rows.layout.planes, strict=True)
        ],
        axis=1,
    )


def _basis(layout: KVLayout, rope: Rope, *, rot_k: bool = False) -> Basis:
    samples = [_rows(600, layout, rope, 4, seed) for seed in (1, 2)]
    groups = groups_of(layout, 2)
    return learn(samples, rope, CODINGS, row_identity=b"", groups=groups, rot_k=rot_k)


@pytest.mark.parametrize("name", list(CASES))
def test_rows_come_back_as_native_rows(name: str) -> None:
    """Within what the coding and the types round; few components hold rows whose keys were rotated back."""
    layout, rope = CASES[name]
    basis = _basis(layout, rope)
    assert read_basis(basis.data).data == basis.data
    rows = _rows(200, layout, rope, 100, seed=3)
    data = coded.encode(rows, basis, "fine", rope)
    for p0, p1 in ((100, 300), (170, 240), (299, 300)):
        read = coded.parse(data).read(p0, p1, basis, rope)
        native = rows.slice(p0, p1)
        assert read.layout == layout
        assert (read.positions == native.positions).all()
        if layout.cell_ext:
            assert read.ext is not None
            assert (read.ext == native.ext).all()
        errors, size = _floats(read) - _floats(native), np.abs(_floats(native)).max()
        allowed = {"q8_0": 0.02, "q5_1": 0.1}.get(layout.v[0].format.name if layout.v else "", 0.01)
        if layout.k[0].format.is_quantized:
            allowed = 0.02
        assert np.abs(errors).max() < allowed * size
    if {plane.format.name for plane in layout.planes} <= {
        "f16",
        "f32",
    }:  # others are noise of their own
        assert max(len(group.vectors) for group in basis.groups) < 4 * N_SOURCES
        assert len(data) < 0.2 * len(rows) * layout.token_bytes


def test_keys_that_the_cache_rotates_before_it_quantizes_them() -> None:
    """llama.cpp's Hadamard rotation is undone before the position's, so that as few components are left."""
    layout, rope = CASES["q8_0"]
    plain = [_rows(600, layout, rope, 4, seed) for seed in (1, 2, 3)]

    def hadamard(rows: KVRows) -> KVRows:
        """Each head times a Walsh-Hadamard matrix, as llama.cpp writes keys."""
        matrix = np.ones((1, 1))
        while len(matrix) < HEAD:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        planes = []
        for plane in rows.k:
            wide = dispatch.transcoded(plane, "q8_0", "f32").view(np.float32)
            turned = wide.reshape(len(wide), -1, HEAD) @ matrix / np.sqrt(HEAD)
            flat = turned.reshape(wide.shape).astype(np.float32).view(np.uint8)
            planes.append(dispatch.transcoded(flat, "f32", "q8_0"))
        return replace(rows, k=tuple(planes))

    rows = [hadamard(each) for each in plain]
    sizes = {}
    for rot_k in (True, False):
        groups = groups_of(layout, 2)
        basis = learn(rows[:2], rope, CODINGS, row_identity=b"", groups=groups, rot_k=rot_k)
        assert read_basis(basis.data).rot_k == rot_k
        data = coded.encode(rows[2], basis, "fine", rope)
        read = coded.parse(data).read(4, 604, basis, rope)
        errors = _floats(read) - _floats(rows[2])
        assert np.abs(errors).max() < 0.03 * np.abs(_floats(rows[2])).max()
        sizes[rot_k] = len(data)
    assert sizes[True] < 0.9 * sizes[False]


def test_rows_of_pictures_are_refused() -> None:
    layout, rope = CASES["M-RoPE"]
    basis = _basis(layout, rope)
    rows = _rows(80, layout, rope, 100)
    assert rows.ext is not None
    patches = rows.ext.copy()
    patches[10:20, 1] = 100
    with pytest.raises(CodecError, match="pictures"):
        coded.encode(replace(rows, ext=patches), basis, "fine", rope)


def test_a_damaged_extension_costs_its_page() -> None:
    layout, rope = CASES["M-RoPE"]
    basis = _basis(layout, rope)
    rows = _rows(150, layout, rope, 100)
    data = bytearray(coded.encode(rows, basis, "fine", rope))
    data[-1] ^= 1
    parsed = coded.parse(data)
    with pytest.raises(Damaged, match=r"\[228, 250\)"):
        parsed.read(100, 250, basis, rope)
    assert len(parsed.read(100, 228, basis, rope)) == 128


def test_rows_that_are_stored_already_are_refused() -> None:
    layout, rope = CASES["f16"]
    basis = _basis(layout, rope)
    rows = stored(_rows(80, layout, rope), "q4h")
    with pytest.raises(CodecError, match="another model or cache type"):
        coded.encode(rows, basis, "fine", rope)
    with pytest.raises(CodecError, match="stored format"):
        learn([rows], rope, CODINGS, row_identity=b"", groups=groups_of(rows.layout, 1))
