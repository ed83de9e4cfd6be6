"""The same rows at other positions: K rotated once more, V as it is.

A row depends on its position only through its key's rotation, as long as what stands before it
is the same at the same distances (towers paper, Definition 6, Remark 8, Theorem 9).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from towerd.kernels import dispatch
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rope import LayerRope, Rope, Table
from towerd.slots.rows import Bytes2D, KVRows

Places = npt.NDArray[np.int64]

POSITION_MAX = (1 << 31) - 1
ROUNDED_POSITION_MIN = 8192
"""From this position on, rows are moved along llama.cpp's rounded angles (see
`Rope.rounded_tables`). Below it, the difference is less than a quarter of f16's rounding."""
HADAMARD_MIN = 64
"""llama.cpp's smallest rotation of quantized keys, and what a head must be a multiple of."""


def shift(
    rows: KVRows,
    to: int,
    rope: Rope,
    *,
    place: int | None = None,
    rot_k: bool = False,
    n_threads: int = dispatch.THREADS,
) -> KVRows:
    """The rows with the first at position `to` and the distances between them kept.

    place: what the first is rotated to; None: `to`. In a model with M-RoPE the place of a row of
    text, which is in its extension, differs from its position if a picture is before it.
    rot_k: the cache stores quantized keys Hadamard-rotated (`RowIdentity.rot_k`). Native
    formats only; quantized keys are rounded once more. V, and keys of layers without RoPE, are
    the same arrays; rows that stay where they are, the same value. StateError if `rope` does not
    fit the layout, a plane is in a stored format, or a position would be out of range."""
    check_rope(rows.layout, rope)
    if to < 0 or rows.p1 + to - rows.p0 > POSITION_MAX:
        raise StateError(f"rows [{rows.p0}, {rows.p1}) cannot begin at position {to}")
    at = rows.positions if rows.ext is None else rows.ext[:, 0]
    delta = (to if place is None else place) - int(at[0])
    if delta == 0:
        return rows if to == rows.p0 else _numbered(rows, to)
    tables: dict[LayerRope, _Tables] = {}
    planes = []
    for i, (plane, layer) in enumerate(zip(rows.layout.k, rope.layers, strict=True)):
        source = rows.k[i]
        if layer.kind != "none":
            if layer not in tables:
                tables[layer] = _tables(at, rope, i, delta)
            block = _hadamard_block(rows.layout, plane, layer) if rot_k else 0
            source = _rotated(source, plane, layer, tables[layer], block, n_threads)
        planes.append(source)
    positions = rows.positions + np.int32(to - rows.p0)
    ext = _moved_ext(rows, delta)
    return KVRows(rows.layout, positions, tuple(planes), rows.v, ext, rows.v_trans)


def _numbered(rows: KVRows, to: int) -> KVRows:
    """The same rows with the first at position `to`."""
    positions = rows.positions + np.int32(to - rows.p0)
    return replace(rows, positions=positions, blob=None)


def unrotated(
    rows: KVRows, rope: Rope, *, rot_k: bool = False, n_threads: int = dispatch.THREADS
) -> KVRows:
    """Native rows with every key as it would be at position 0, which is what is alike among the layers and
    positions of a text. `rotated` brings them back, but for a rounding each way.

    rot_k: keys are Hadamard-rotated, whatever format they are in now; they stay so

    StateError as `shift`, and for rows of pictures, whose keys have positions of several components."""
    return _turned(rows, rope, True, rot_k, n_threads)


def rotated(
    rows: KVRows, rope: Rope, *, rot_k: bool = False, n_threads: int = dispatch.THREADS
) -> KVRows:
    """Rows of `unrotated` with each key at its position again."""
    return _turned(rows, rope, False, rot_k, n_threads)


def _turned(rows: KVRows, rope: Rope, back: bool, rot_k: bool, n_threads: int) -> KVRows:
    check_rope(rows.layout, rope)
    at = rows.positions
    if rows.ext is not None:
        at = rows.ext[:, 0]
        if not np.array_equal(at, rows.ext[:, 1]):
            raise StateError("keys of pictures are not rotated back")
    tables: dict[LayerRope, _Tables] = {}
    lines = np.arange(len(rows), dtype=np.int32)
    planes = []
    for i, (plane, layer) in enumerate(zip(rows.layout.k, rope.layers, strict=True)):
        source = rows.k[i]
        if layer.kind != "none":
            if layer not in tables:
                tables[layer] = _Tables(*rope.row_tables(i, at, back=back), lines)
            block = hadamard_block(layer) if rot_k and rows.layout.v else 0
            source = _rotated(source, plane, layer, tables[layer], block, n_threads)
        planes.append(source)
    return KVRows(rows.layout, rows.positions, tuple(planes), rows.v, rows.ext, rows.v_trans)


def compose_at(
    parts: Sequence[KVRows],
    rope: Rope,
    *,
    start: int = 0,
    rot_k: bool = False,
    n_threads: int = dispatch.THREADS,
) -> list[KVRows]:
    """A tower: each part moved to where the one before it ends, the first to `start`.

    Equal to prefilling the tokens in this order if each part was computed after the same tokens
    at the same distances (Theorem 9); anything else is an approximation, which is the
    caller's responsibility. StateError as `shift`, or if a part has holes or the layouts differ."""
    if not parts:
        raise StateError("no rows to compose")
    if any(part.layout != parts[0].layout for part in parts):
        raise StateError("the parts have different layouts")
    if not all(part.is_consecutive for part in parts):
        raise StateError("a part has holes: a tower has a row for every position")
    ends = itertools.accumulate((len(part) for part in parts), initial=start)
    return [
        shift(part, at, rope, rot_k=rot_k, n_threads=n_threads)
        for part, at in zip(parts, ends, strict=False)
    ]


def turn(
    rows: KVRows,
    places: Places,
    to: npt.NDArray[np.int64],
    rope: Rope,
    *,
    rot_k: bool = False,
    n_threads: int = dispatch.THREADS,
) -> KVRows:
    """The rows with each at a place of its own, its keys rotated there from where they are.

    places: int64[layers, KV heads, n]: what each key is rotated to; one layer or head stands for all
    to: int64[n], ascending. Otherwise as `shift`; in a model with M-RoPE these are rows of text."""
    if int(to[0]) < 0 or int(to[-1]) >= POSITION_MAX:
        raise StateError(f"rows cannot be at positions {int(to[0])} to {int(to[-1])}")
    keys = dict(enumerate(rows.k))
    k = turn_keys(keys, rows.layout, places, to, rope, rot_k=rot_k, n_threads=n_threads)
    labels = to.astype(np.int32)
    ext = None if rows.ext is None else np.stack([labels, labels, rows.ext[:, 2]], axis=1)
    return KVRows(rows.layout, labels, tuple(k.values()), rows.v, ext, rows.v_trans)


def turn_keys(
    keys: Mapping[int, Bytes2D],
    layout: KVLayout,
    places: Places,
    to: Places,
    rope: Rope,
    *,
    rot_k: bool = False,
    n_threads: int = dispatch.THREADS,
) -> dict[int, Bytes2D]:
    """The keys of some layers rotated from where they are to other places; see `turn`. Those that are not
    rotated are the same arrays.

    keys: uint8[n, row_bytes] by number of the layer in `layout`; to: int64[n], in any order"""
    check_rope(layout, rope)
    tables: dict[tuple[LayerRope, int], _Tables] = {}
    turned: dict[int, Bytes2D] = {}
    for i, source in keys.items():
        plane, layer, at = layout.k[i], rope.layers[i], places[i if len(places) > 1 else 0]
        turned[i] = source
        if layer.kind == "none":
            continue
        block = _hadamard_block(layout, plane, layer) if rot_k else 0
        width, turned[i] = source.shape[1] // len(at), np.empty(source.shape, np.uint8)
        for head, line in enumerate(at):
            key = layer, head if len(places) == 1 else i * len(at) + head
            if key not in tables:
                tables[key] = _tables_between(line, to, rope, i)
            span = np.s_[:, head * width : (head + 1) * width]
            _rotate(source[span], turned[i][span], plane, layer, tables[key], block, n_threads)
    return turned


def check_rope(layout: KVLayout, rope: Rope) -> None:
    """StateError unless `rope` describes the layers that a cache of `layout` holds."""
    if len(rope.layers) != layout.n_layer:
        raise StateError(f"the RoPE has {len(rope.layers)} layers, the cache {layout.n_layer}")
    if rope.n_window != layout.n_window:
        raise StateError(
            f"the RoPE has {rope.n_window} sliding-window layers, the cache {layout.n_window}"
        )
    if rope.is_multi != layout.cell_ext:
        raise StateError("cells have an extension exactly when the RoPE is an M-RoPE")
    for plane, layer in zip(layout.k, rope.layers, strict=True):
        if not plane.format.is_cache_type:
            raise StateError(f"keys in the stored format {plane.format.name} cannot be rotated")
        if plane.n_elements % layer.head_dim:
            raise StateError(
                f"a key of {plane.n_elements} elements is not whole heads of {layer.head_dim}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """float32[k, n_rot / 2] each, and the line of each row; None: there is one line for all."""

    cos: Table
    sin: Table
    row_table: npt.NDArray[np.int32] | None


def _tables(at: npt.NDArray[np.int32], rope: Rope, layer: int, delta: int) -> _Tables:
    """One line for all rows, which are rotated to `at`, or one for each row where llama.cpp's own
    rounding matters."""
    if int(at[-1]) + 1 + max(0, delta) <= ROUNDED_POSITION_MIN:
        return _Tables(*rope.tables(layer, [delta]), None)
    lines = np.arange(len(at), dtype=np.int32)
    return _Tables(*rope.rounded_tables(layer, at, delta), lines)


def _tables_between(at: Places, to: Places, rope: Rope, layer: int) -> _Tables:
    """The lines that rotate each key from `at` to `to`: one for each distance, or one for each row where
    llama.cpp's own rounding matters."""
    if max(int(at.max()), int(to.max())) < ROUNDED_POSITION_MIN:
        deltas, numbers = np.unique(to - at, return_inverse=True)
        cos, sin = rope.tables(layer, deltas)
    else:
        numbers, deltas = np.arange(len(at)), (to - at).astype(np.int32)
        cos, sin = rope.rounded_tables(layer, at.astype(np.int32), deltas)
    lines = np.where(to == at, -1, numbers)  # what stays is copied
    return _Tables(cos, sin, lines.astype(np.int32))


def _rotated(
    source: Bytes2D,
    plane: Plane,
    layer: LayerRope,
    tables: _Tables,
    block: int,
    n_threads: int,
) -> Bytes2D:
    out = np.empty(source.shape, np.uint8)
    _rotate(source, out, plane, layer, tables, block, n_threads)
    return out


def _rotate(
    source: Bytes2D,
    out: Bytes2D,
    plane: Plane,
    layer: LayerRope,
    tables: _Tables,
    block: int,
    n_threads: int,
) -> None:
    try:
        dispatch.rope_shift(
            source,
            out,
            plane.format.name,
            tables.cos,
            tables.sin,
            tables.row_table,
            layer.head_dim,
            layer.n_rot,
            layer.first,
            layer.kind == "neox",
            block,
            n_threads,
        )
    except ValueError as error:  # a key that is not a finite number
        raise StateError(f"the keys cannot be rotated: {error}") from error


def _hadamard_block(layout: KVLayout, plane: Plane, layer: LayerRope) -> int:
    """The largest power of two that divides the head, for quantized keys of caches with a V.

    MLA's K-only attention writes its keys without it (llama.cpp `src/llama-graph.cpp`)."""
    return hadamard_block(layer) if plane.format.is_quantized and layout.v else 0


def hadamard_block(layer: LayerRope) -> int:
    """How many elements llama.cpp rotates together where it rotates keys; 0: a head is not whole runs."""
    return 0 if layer.head_dim % HADAMARD_MIN else layer.head_dim & -layer.head_dim


def _moved_ext(rows: KVRows, delta: int) -> npt.NDArray[np.int32] | None:
    """x and y are positions too; the third column is the token's id."""
    if rows.ext is None:
        return None
    return rows.ext + np.array([delta, delta, 0], np.int32)
