"""Plain rows, which a basis transforms: keys as at position 0, every plane in the same element format.

Rows of quantized caches are transformed as f16 and quantized again when they are read: their own rounding is
far finer than a coding's.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from towerd.codec.errors import CodecError
from towerd.kernels import dispatch
from towerd.kernels.formats import BY_NAME
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows
from towerd.slots.shift import rotated, unrotated


@functools.lru_cache(maxsize=64)
def plain_layout(layout: KVLayout) -> KVLayout:
    """The layout itself if all planes are in the same element format; otherwise their numbers in f16, or in f32
    where a plane has those."""
    formats = {plane.format for plane in layout.planes}
    if len(formats) == 1 and not next(iter(formats)).is_quantized:
        return layout
    name = "f16" if all(each.is_quantized or each.name == "f16" for each in formats) else "f32"
    like = BY_NAME[name]
    k, v = (
        tuple(Plane(like.type_id, like.row_bytes(plane.n_elements)) for plane in planes)
        for planes in (layout.k, layout.v)
    )
    return replace(layout, k=k, v=v)


def plain_format(layout: KVLayout) -> str:
    """The name of the element format of every plain plane."""
    return plain_layout(layout).planes[0].format.name


def flattened(
    rows: KVRows, rope: Rope, *, rot_k: bool = False, n_threads: int = dispatch.THREADS
) -> KVRows:
    """Plain rows of native ones. rot_k: see `unrotated`.

    CodecError for rows that are not finite, or that have no plain form: pictures' of an M-RoPE, stored ones."""
    if not rows.layout.is_native:
        raise CodecError("Rows in a stored format are not transform-coded.")
    plain = _converted(rows.token_major(), plain_layout(rows.layout), n_threads)
    if plain.ext is not None and not (plain.ext[:, 0] == plain.ext[:, 1]).all():
        raise CodecError("Rows of pictures are not transform-coded.")
    return unrotated(plain, rope, rot_k=rot_k, n_threads=n_threads)


def native(
    plain: KVRows,
    layout: KVLayout,
    rope: Rope,
    *,
    rot_k: bool = False,
    n_threads: int = dispatch.THREADS,
) -> KVRows:
    """Plain rows as native ones of `layout` again. CodecError for numbers that its formats do not have."""
    return _converted(rotated(plain, rope, rot_k=rot_k, n_threads=n_threads), layout, n_threads)


def _converted(rows: KVRows, layout: KVLayout, n_threads: int) -> KVRows:
    if rows.layout == layout:
        return rows
    planes = []
    for have, plane, wanted in zip(rows.planes(), rows.layout.planes, layout.planes, strict=True):
        if plane.format != wanted.format:
            try:
                have = dispatch.transcoded(have, plane.format.name, wanted.format.name, n_threads)
            except ValueError as error:
                raise CodecError(f"The rows cannot be transform-coded: {error}.") from error
        planes.append(have)
    n = layout.n_layer
    return KVRows(layout, rows.positions, tuple(planes[:n]), tuple(planes[n:]), rows.ext)
