"""Rows in every format by plain numpy: what kernels, blobs and files are compared with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lab.reference.blocks import decode_blocks, encode_blocks
from towerd.kernels import dispatch
from towerd.kernels.formats import BY_NAME, STORED_FORMATS
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import KVRows

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
STORED = tuple(row.name for row in STORED_FORMATS)


def plane_of(name: str, n_elements: int) -> Plane:
    """A plane of rows of so many elements."""
    row = BY_NAME[name]
    return Plane(row.type_id, row.row_bytes(n_elements))


def hadamard(values: Floats, block: int) -> Floats:
    """Every run of `block` elements times the normalised Sylvester matrix; its own inverse."""
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    runs = values.reshape(len(values), -1, block).astype(np.float64)
    rotated = (runs @ matrix / np.sqrt(block)).astype(np.float32)
    return np.asarray(rotated.reshape(values.shape), np.float32)


def decode(name: str, rows: Bytes) -> Floats:
    """f32[n, elements] of uint8[n, row_bytes]."""
    row = BY_NAME[name]
    rows = np.ascontiguousarray(rows)
    if name == "f32":
        return rows.view(np.float32)
    if name == "f16":
        return rows.view(np.float16).astype(np.float32)
    if name == "bf16":
        return np.asarray((rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
    values = decode_blocks(row.codec, rows)
    block = row.hadamard_block(values.shape[1])
    return hadamard(values, block) if block else values


def encode(name: str, values: Floats) -> Bytes:
    """The inverse, to nearest."""
    row = BY_NAME[name]
    if name == "f32":
        return np.ascontiguousarray(values).view(np.uint8)
    if name == "f16":
        return values.astype(np.float16).view(np.uint8)
    if name == "bf16":
        bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.astype(np.uint16).view(np.uint8)
    block = row.hadamard_block(values.shape[1])
    return encode_blocks(row.codec, hadamard(values, block) if block else values)


def random_rows(layout: KVLayout, p0: int, p1: int, seed: int = 0) -> KVRows:
    """Rows of ordinary numbers, in a layout of cache types."""
    rng = np.random.default_rng(seed)
    n = p1 - p0
    planes = [
        encode(plane.format.name, rng.standard_normal((n, plane.n_elements), np.float32))
        for plane in layout.planes
    ]
    positions = np.arange(p0, p1, dtype=np.int32)
    ext = rng.integers(0, 99, (n, 3)).astype(np.int32) if layout.cell_ext else None
    n_k = layout.n_layer
    return KVRows(layout, positions, tuple(planes[:n_k]), tuple(planes[n_k:]), ext)


def converted(rows: KVRows, layout: KVLayout) -> KVRows:
    """The same values in another layout, by the kernel in use."""
    planes = [
        dispatch.transcoded(plane, have.format.name, want.format.name, 1)
        for have, want, plane in zip(rows.layout.planes, layout.planes, rows.planes(), strict=True)
    ]
    n_k = layout.n_layer
    return KVRows(layout, rows.positions, tuple(planes[:n_k]), tuple(planes[n_k:]), rows.ext)


def stored(rows: KVRows, name: str) -> KVRows:
    """Native rows as they are kept in a stored format."""
    return converted(rows, rows.layout.stored_as(name))


def floats(rows: KVRows) -> list[Floats]:
    """The values of every plane."""
    return [
        decode(plane.format.name, data)
        for plane, data in zip(rows.layout.planes, rows.planes(), strict=True)
    ]
