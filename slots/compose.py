"""Write the state of a plain KV cache from parts, in one pass over their bytes. Rows in the
destination's format are copied; rows in a stored format are decoded straight into place.

    u32 n_stream | per stream: u32 n_cells and, for the one that holds cells:
    cell table | u32 v_trans | u32 n_layer | K sections | V sections
A section is a 12-byte header and one row per cell (K, V) or, for a transposed V, one run of
all cells' elements per channel.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.kernels import dispatch
from towerd.kernels.arrays import Job
from towerd.kernels.formats import BY_NAME
from towerd.slots.cells import cell_bytes, cell_table
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import KVRows, check_consecutive, check_positions

STREAMS_MAX = 256
"""llama.cpp's bound on sequences, and so on streams."""
SECTION_BYTES = 12
CELLS_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class StateFrame:
    """How the destination context wants its state: as many streams as its KV cache has (1 if
    unified), the stream that the cells go to, V transposed or not, and the sequence id to
    record (llama.cpp ignores it). StateError if a value is out of range."""

    n_stream: int = 1
    stream: int = 0
    v_trans: bool = False
    seq_id: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.n_stream <= STREAMS_MAX:
            raise StateError(f"n_stream is {self.n_stream}; expected 1 to {STREAMS_MAX}")
        if not 0 <= self.stream < self.n_stream:
            raise StateError(f"stream is {self.stream}; expected 0 to {self.n_stream - 1}")
        if not 0 <= self.seq_id < 1 << 31:
            raise StateError(f"seq_id is {self.seq_id}; expected 0 to {(1 << 31) - 1}")


def state_size(layout: KVLayout, n: int, n_stream: int) -> int:
    """Bytes of the state of `n` cells; the same for transposed and plain V."""
    if not 0 < n <= CELLS_MAX:
        raise StateError(f"{n} cells; expected 1 to {CELLS_MAX}")
    sections = sum(SECTION_BYTES + n * plane.row_bytes for plane in layout.planes)
    return 4 + 4 * n_stream + n * cell_bytes(layout.cell_ext) + 8 + sections


def check_parts(
    parts: Sequence[KVRows], frame: StateFrame, layout: KVLayout | None = None
) -> KVLayout:
    """The layout to write: `layout`, or the one that all parts share.

    StateError if the parts are not consecutive, hold other values than `layout`, or cannot be
    framed as `frame` says (llama.cpp has no transposed quantized V and no stored formats)."""
    if layout is None:
        layout = check_consecutive(parts)
    else:
        check_positions(parts)
        if not all(part.layout is layout or part.layout.converts_to(layout) for part in parts):
            raise StateError("a part holds other values than the layout to write")
    if not layout.is_native:
        raise StateError("a state cannot hold stored formats")
    if frame.v_trans:
        for plane in layout.v:
            check_transposable(plane)
    return layout


def check_transposable(plane: Plane) -> None:
    """StateError for a quantized plane."""
    if plane.format.is_quantized:
        raise StateError(f"a {plane.format.name} V cannot be transposed")


def write_state(
    out: npt.NDArray[np.uint8],
    parts: Sequence[KVRows],
    frame: StateFrame,
    order: npt.NDArray[np.int64] | None = None,
    n_threads: int = dispatch.THREADS,
    layout: KVLayout | None = None,
    is_new: bool = False,
) -> None:
    """Fill `out` (exactly `state_size` bytes, checked parts) with the state.

    order: int64[n], the row that each cell holds, for a single part; None: position order.
    layout: what to write; None: the parts' own
    is_new: as in `towerd.kernels.dispatch.transcode`"""
    layout = parts[0].layout if layout is None else layout
    n = sum(len(part) for part in parts)
    table = cell_table(parts, frame.seq_id, order)
    counts = [n if stream == frame.stream else 0 for stream in range(frame.n_stream)]
    at = 4 * (frame.stream + 2)
    out[:at] = np.array([frame.n_stream, *counts[: frame.stream + 1]], "<u4").view(np.uint8)
    out[at : at + len(table)] = table
    at += len(table)
    struct.pack_into("<II", out.data, at, frame.v_trans, layout.n_layer)
    at += 8
    moves = _Moves()
    for i, plane in enumerate(layout.planes):
        transposed = frame.v_trans and i >= layout.n_layer
        _write_header(out, at, plane, transposed)
        at += SECTION_BYTES
        if transposed:
            section = out[at : at + n * plane.row_bytes].reshape(plane.n_elements, -1)
            _write_channels(section, parts, i, plane, order, n_threads)
        else:
            moves.add(at, [(part.layout.planes[i], part.plane(i)) for part in parts], plane, order)
        at += n * plane.row_bytes
    moves.run(out, n_threads, is_new)
    out[at:] = 0  # the streams after this one are empty


_Source: TypeAlias = tuple[Plane, npt.NDArray[np.uint8]]
"""One plane of one part: its description, and its rows uint8[n, row_bytes]."""
_Conversion: TypeAlias = tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.int64] | None, str, str]
"""(offset, rows, order, source format, destination format)."""


@dataclass(slots=True)
class _Moves:
    """The jobs that fill one buffer: copies, and conversions from other formats. Conversions to a
    quantized format go through temporary memory, one plane at a time."""

    copies: list[Job] = field(default_factory=list)
    conversions: list[_Conversion] = field(default_factory=list)

    def add(
        self, at: int, runs: Sequence[_Source], plane: Plane, order: npt.NDArray[np.int64] | None
    ) -> None:
        """Write the runs one after the other from offset `at`, as rows of `plane`."""
        for stored, rows in runs:
            if stored.ggml_type == plane.ggml_type:
                self.copies.append((at, rows, order))
            else:
                names = stored.format.name, plane.format.name
                self.conversions.append((at, rows, order, *names))
            at += len(rows) * plane.row_bytes

    def run(self, out: npt.NDArray[np.uint8], n_threads: int, is_new: bool) -> None:
        if self.copies:
            dispatch.copy_planes(out, self.copies, n_threads)
        direct = [job for job in self.conversions if not BY_NAME[job[4]].is_quantized]
        if direct:
            dispatch.transcode(out, direct, n_threads, is_new)
        for at, rows, order, have, want in self.conversions:
            if BY_NAME[want].is_quantized:
                moved = dispatch.transcoded(rows, have, want, n_threads)
                dispatch.copy_planes(out, [(at, moved, order)], n_threads)


def _write_header(out: npt.NDArray[np.uint8], at: int, plane: Plane, transposed: bool) -> None:
    if transposed:
        element_bytes = plane.format.block_bytes
        struct.pack_into("<iII", out.data, at, plane.ggml_type, element_bytes, plane.n_elements)
    else:
        struct.pack_into("<iQ", out.data, at, plane.ggml_type, plane.row_bytes)


def _write_channels(
    section: npt.NDArray[np.uint8],
    parts: Sequence[KVRows],
    i: int,
    plane: Plane,
    order: npt.NDArray[np.int64] | None,
    n_threads: int,
) -> None:
    """Plane i of every part as channels, each part a range of columns of
    section: uint8[channels, n * element_bytes]"""
    at = 0
    for part in parts:
        columns = section[:, at : at + len(part) * plane.format.block_bytes]
        stored = part.layout.planes[i]
        if part.v_trans and order is None and stored.ggml_type == plane.ggml_type:
            np.copyto(columns, part.v[i - part.layout.n_layer])
        else:
            _transpose(columns, (stored, part.plane(i)), plane, order, n_threads)
        at += columns.shape[1]


def _transpose(
    columns: npt.NDArray[np.uint8],
    source: _Source,
    plane: Plane,
    order: npt.NDArray[np.int64] | None,
    n_threads: int,
) -> None:
    """Rows in another format or order first go through a temporary copy of the plane."""
    stored, rows = source
    if order is not None or stored.ggml_type != plane.ggml_type:
        moves = _Moves()
        moves.add(0, [source], plane, order)
        rows = np.empty((len(rows), plane.row_bytes), np.uint8)
        moves.run(rows.reshape(-1), n_threads, is_new=True)
    dispatch.transpose(rows, columns, plane.format.block_bytes, n_threads)
