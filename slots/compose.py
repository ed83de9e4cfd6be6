"""Write the state of a plain KV cache from parts, in one pass over their bytes.

    u32 n_stream | per stream: u32 n_cells and, for the one that holds cells:
    cell table | u32 v_trans | u32 n_layer | K sections | V sections
A section is a 12-byte header and one row per cell (K, V) or, for a transposed V, one run of
all cells' elements per channel.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.kernels import dispatch
from towerd.slots.cells import cell_bytes, cell_table
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import KVRows, check_consecutive

STREAMS_MAX = 256
"""llama.cpp's bound on sequences, and so on streams."""
SECTION_BYTES = 12
CELLS_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Frame:
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


def check_parts(parts: Sequence[KVRows], frame: Frame) -> KVLayout:
    """The layout of `parts`. StateError if they are not consecutive or cannot be written as
    `frame` says (llama.cpp has no transposed quantized V)."""
    layout = check_consecutive(parts)
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
    frame: Frame,
    order: npt.NDArray[np.int64] | None = None,
    n_threads: int = dispatch.THREADS,
) -> None:
    """Fill `out` (exactly `state_size` bytes, checked parts) with the state.

    order: int64[n], the row that each cell holds, for a single part; None: position order."""
    layout = parts[0].layout
    n = sum(len(part) for part in parts)
    table = cell_table(parts, frame.seq_id, order)
    counts = [n if stream == frame.stream else 0 for stream in range(frame.n_stream)]
    at = 4 * (frame.stream + 2)
    out[:at] = np.array([frame.n_stream, *counts[: frame.stream + 1]], "<u4").view(np.uint8)
    out[at : at + len(table)] = table
    at += len(table)
    struct.pack_into("<II", out.data, at, frame.v_trans, layout.n_layer)
    at += 8
    jobs: list[dispatch.Job] = []
    rows = [part.k + part.v for part in parts]
    for i, plane in enumerate(layout.planes):
        transposed = frame.v_trans and i >= layout.n_layer
        _write_header(out, at, plane, transposed)
        at += SECTION_BYTES
        sources = [planes[i] for planes in rows]
        if transposed:
            section = out[at : at + n * plane.row_bytes].reshape(plane.n_elements, -1)
            _transpose_parts(section, sources, plane, order, n_threads)
        else:
            jobs += _copies(at, sources, order)
        at += n * plane.row_bytes
    dispatch.copy_planes(out, jobs, n_threads)
    out[at:] = 0  # the streams after this one are empty


def _write_header(out: npt.NDArray[np.uint8], at: int, plane: Plane, transposed: bool) -> None:
    if transposed:
        element_bytes = plane.format.block_bytes
        struct.pack_into("<iII", out.data, at, plane.ggml_type, element_bytes, plane.n_elements)
    else:
        struct.pack_into("<iQ", out.data, at, plane.ggml_type, plane.row_bytes)


def _copies(
    at: int, sources: Sequence[npt.NDArray[np.uint8]], order: npt.NDArray[np.int64] | None
) -> list[dispatch.Job]:
    jobs: list[dispatch.Job] = []
    for source in sources:
        jobs.append((at, source, order))
        at += source.size
    return jobs


def _transpose_parts(
    section: npt.NDArray[np.uint8],
    sources: Sequence[npt.NDArray[np.uint8]],
    plane: Plane,
    order: npt.NDArray[np.int64] | None,
    n_threads: int,
) -> None:
    """section: uint8[channels, n * element_bytes], each part a range of its columns."""
    element_bytes = plane.format.block_bytes
    at = 0
    for source in sources:
        rows = source
        if order is not None:
            rows = np.empty(source.shape, np.uint8)
            dispatch.gather_rows(source, order, rows, n_threads)
        columns = section[:, at : at + len(rows) * element_bytes]
        dispatch.transpose(rows, columns, element_bytes, n_threads)
        at += len(rows) * element_bytes
