"""SequenceState: one sequence of a plain KV cache, parsed from llama.cpp's bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.kernels import dispatch
from towerd.kernels.formats import BY_TYPE
from towerd.slots.cells import Cells, parse_cells
from towerd.slots.compose import (
    SECTION_BYTES,
    STREAMS_MAX,
    StateFrame,
    check_transposable,
    state_size,
    write_state,
)
from towerd.slots.errors import StateError
from towerd.slots.layout import LAYERS_MAX, KVLayout, Plane, cache_plane
from towerd.slots.reader import ByteReader
from towerd.slots.rows import Bytes2D, KVRows

BLOB_MAGIC = 0xAF143CD8
PREFIX_BYTES = 8
"""A blob is the magic word and the sequence id, then the state; a slot file has only the state."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceState:
    """The rows of one sequence (sorted by position) and how they were framed.

    order: int64[n], the row that each cell of the source holds; None if cells were sorted"""

    rows: KVRows
    frame: StateFrame
    order: npt.NDArray[np.int64] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the state, without a blob's or file's prefix."""
        return state_size(self.rows.layout, len(self.rows), self.frame.n_stream)

    def write(self, out: npt.NDArray[np.uint8]) -> None:
        """Fill `out` (exactly `nbytes` bytes) with the state, cells in their source's order."""
        write_state(out, (self.rows,), self.frame, self.order)

    def to_bytes(self) -> bytes:
        """The sequence blob, byte for byte as it was parsed."""
        out = np.empty(PREFIX_BYTES + self.nbytes, np.uint8)
        write_prefix(out, self.frame.seq_id)
        self.write(out[PREFIX_BYTES:])
        return out.tobytes()


def write_prefix(out: npt.NDArray[np.uint8], seq_id: int) -> None:
    """Fill the first PREFIX_BYTES bytes of `out` with a sequence blob's prefix."""
    struct.pack_into("<Ii", out.data, 0, BLOB_MAGIC, seq_id)


@dataclass(frozen=True, slots=True, eq=False)
class _Section:
    """One plane's bytes: uint8[n, row_bytes], or uint8[channels, n * element_bytes]."""

    plane: Plane
    data: Bytes2D
    transposed: bool

    def rows(self, n: int, by_position: npt.NDArray[np.int64] | None) -> Bytes2D:
        """uint8[n, row_bytes] in position order; a view if neither moved nor transposed."""
        rows = self.data
        if self.transposed:
            rows = np.empty((n, self.plane.row_bytes), np.uint8)
            dispatch.transpose(self.data, rows, self.plane.format.block_bytes)
        if by_position is not None:
            unsorted, rows = rows, np.empty((n, self.plane.row_bytes), np.uint8)
            dispatch.copy_planes(rows.reshape(-1), [(0, unsorted, by_position)])
        return rows


def parse_state(
    reader: ByteReader,
    *,
    cell_ext: bool,
    has_v: bool | None = None,
    is_last: bool = True,
    as_is: bool = False,
    n_layer_min: int = 1,
) -> SequenceState:
    """Read a whole state; if it `is_last`, it must end where the bytes end.

    has_v: whether V sections follow the K sections; None: decided by whether bytes are left,
    which works for the last state only
    as_is: leave a transposed V transposed (`KVRows.v_trans`) if the cells are sorted
    n_layer_min: 0: a cache that no layer uses passes, too
    Everything is checked before any row is moved; rows are views into the source when its
    cells are sorted and V need not be transposed, otherwise copies of the same size.
    StateError if the bytes are anything but one plain KV cache with cells in exactly one stream."""
    n_stream = reader.u32("n_stream")
    if not 1 <= n_stream <= STREAMS_MAX:
        raise StateError(f"n_stream is {n_stream}; expected 1 to {STREAMS_MAX}")
    found: tuple[int, Cells, bool, list[_Section], list[_Section]] | None = None
    for stream in range(n_stream):
        n_cells = reader.u32(f"cell count of stream {stream}")
        if n_cells == 0:
            continue
        if found is not None:
            raise StateError("more than one stream holds cells")
        cells = parse_cells(reader, n_cells, cell_ext)
        tail_bytes = 4 * (n_stream - 1 - stream)
        found = (stream, cells, *_parse_sections(reader, n_cells, tail_bytes, has_v, n_layer_min))
    if found is None:
        raise StateError("the state holds no cells")
    if is_last:
        reader.finish()
    stream, cells, v_trans, k, v = found
    layout = KVLayout(tuple(s.plane for s in k), tuple(s.plane for s in v), cell_ext)
    n = len(cells.positions)
    stays = as_is and v_trans and bool(v) and cells.by_position is None
    rows = KVRows(
        layout,
        cells.positions,
        tuple(section.rows(n, cells.by_position) for section in k),
        tuple(section.data if stays else section.rows(n, cells.by_position) for section in v),
        cells.ext,
        stays,
    )
    return SequenceState(rows, StateFrame(n_stream, stream, v_trans, cells.seq_id), cells.order)


def _parse_sections(
    reader: ByteReader, n_cells: int, tail_bytes: int, has_v: bool | None, n_layer_min: int
) -> tuple[bool, list[_Section], list[_Section]]:
    """v_trans, K and V sections. Caches without V (MLA) end after K; only what is left, less
    the `tail_bytes` of the streams that follow, tells them apart."""
    v_trans = reader.u32("v_trans")
    if v_trans not in (0, 1):
        raise StateError(f"v_trans is {v_trans}; expected 0 or 1")
    n_layer = reader.u32("n_layer")
    if not n_layer_min <= n_layer <= min(LAYERS_MAX, reader.remaining // SECTION_BYTES):
        raise StateError(f"n_layer is {n_layer} with {reader.remaining} bytes left")
    k = [_parse_section(reader, n_cells, f"K of layer {i}") for i in range(n_layer)]
    if has_v is False or (has_v is None and reader.remaining == tail_bytes):
        return bool(v_trans), k, []
    parse = _parse_transposed if v_trans else _parse_section
    return bool(v_trans), k, [parse(reader, n_cells, f"V of layer {i}") for i in range(n_layer)]


def _parse_section(reader: ByteReader, n_cells: int, what: str) -> _Section:
    plane = cache_plane(reader.i32(what), reader.u64(what))
    data = reader.take(n_cells * plane.row_bytes, what)
    return _Section(plane, data.reshape(n_cells, plane.row_bytes), False)


def _parse_transposed(reader: ByteReader, n_cells: int, what: str) -> _Section:
    ggml_type, element_bytes, n_elements = (reader.i32(what), reader.u32(what), reader.u32(what))
    plane = cache_plane(ggml_type, element_bytes * n_elements)
    check_transposable(plane)
    if element_bytes != BY_TYPE[ggml_type].block_bytes:
        raise StateError(f"{what}: elements of {element_bytes} bytes do not fit the type")
    data = reader.take(n_cells * plane.row_bytes, what)
    return _Section(plane, data.reshape(n_elements, n_cells * element_bytes), True)


def check_layout(states_layout: KVLayout, expected: KVLayout | None) -> None:
    """StateError if a layout is expected and the state has another one."""
    if expected is not None and states_layout != expected:
        raise StateError(
            f"the state has {_describe(states_layout)}; expected {_describe(expected)}"
        )


def _describe(layout: KVLayout) -> str:
    def planes(name: str, planes: Sequence[Plane]) -> str:
        kinds = sorted({f"{plane.format.name}:{plane.row_bytes}" for plane in planes})
        return f"{name} {'/'.join(kinds) or 'absent'}"

    return f"{layout.n_layer} layers, {planes('K', layout.k)}, {planes('V', layout.v)}"
