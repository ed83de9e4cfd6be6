"""The sequence blob of `llama_state_seq_get_data`: a magic word, a sequence id, the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from towerd.kernels import dispatch
from towerd.slots.compose import StateFrame, check_parts, state_size, write_state
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout
from towerd.slots.reader import ByteReader, Data, as_bytes
from towerd.slots.rows import KVRows
from towerd.slots.state import (
    BLOB_MAGIC,
    PREFIX_BYTES,
    SequenceState,
    check_layout,
    parse_state,
    write_prefix,
)

__all__ = [
    "SequenceState",
    "blob_size",
    "emit_blob",
    "parse_blob",
    "parse_full_rows",
    "parse_rows",
]


def parse_blob(
    data: Data, *, cell_ext: bool = False, layout: KVLayout | None = None
) -> SequenceState:
    """Parse a sequence blob; rows are views into `data` where its order allows.

    cell_ext: the model stores 12 more bytes per cell (nothing in the blob says so)
    layout: what the blob must hold; without it a blob cut exactly between K and V passes as
    one without V
    StateError for anything but one complete plain KV cache sequence, trailing bytes included."""
    reader = ByteReader(data)
    seq_id = _read_prefix(reader)
    state = parse_state(reader, cell_ext=cell_ext)
    if state.frame.seq_id != seq_id:
        raise StateError(
            f"a blob of sequence {seq_id} holds cells of sequence {state.frame.seq_id}"
        )
    check_layout(state.rows.layout, layout)
    return state


def parse_rows(
    data: Data, *, cell_ext: bool = False, has_window: bool = False, layout: KVLayout | None = None
) -> KVRows:
    """The rows of a blob that holds one cache or, if `has_window`, two: that of the full layers
    and that of the sliding window, which must hold the same positions. A transposed V stays
    transposed if the cells are sorted. `KVRows.blob` is set if emitting the rows would give
    the same bytes.

    cell_ext, layout: as for `parse_blob`. The caller must have cut off a state of another kind
    that follows the rows. StateError for anything else."""
    reader = ByteReader(data)
    seq_id = _read_prefix(reader)
    if not has_window:
        states = [parse_state(reader, cell_ext=cell_ext, as_is=True)]
        rows = states[0].rows
    else:
        full = parse_state(reader, cell_ext=cell_ext, has_v=True, is_last=False, as_is=True)
        states = [full, parse_state(reader, cell_ext=cell_ext, has_v=True, as_is=True)]
        rows = _joined(*(state.rows for state in states))
    check_layout(rows.layout, layout)
    if any(state.frame.seq_id != seq_id for state in states):
        raise StateError(f"a blob of sequence {seq_id} holds cells of another one")
    if all(state.frame.n_stream == 1 and state.order is None for state in states):
        rows = replace(rows, blob=as_bytes(data))
    return rows if layout is None else replace(rows, layout=layout)


def parse_full_rows(data: Data, layout: KVLayout) -> KVRows:
    """The rows of the full layers in a blob of two caches, the window's of which may hold other
    positions. layout: of both. StateError as `parse_rows`."""
    full, reader = layout.sections[0], ByteReader(data)
    seq_id = _read_prefix(reader)
    has_v = bool(full.v)
    state = parse_state(reader, cell_ext=full.cell_ext, has_v=has_v, is_last=False, as_is=True)
    if state.frame.seq_id != seq_id:
        raise StateError(f"a blob of sequence {seq_id} holds cells of another one")
    check_layout(state.rows.layout, full)
    return state.rows


def _read_prefix(reader: ByteReader) -> int:
    """Check the magic word and return the sequence id."""
    magic = reader.u32("magic")
    if magic != BLOB_MAGIC:
        raise StateError(f"not a sequence blob: magic is {magic:#010x}, not {BLOB_MAGIC:#010x}")
    return reader.i32("sequence id")


def _joined(full: KVRows, window: KVRows) -> KVRows:
    """Rows of both caches as one value. StateError if their positions differ."""
    if not np.array_equal(full.positions, window.positions):
        raise StateError(
            f"the window holds positions {window.p0} to {window.p1 - 1}, the full layers "
            f"{full.p0} to {full.p1 - 1}"
        )
    a, b = full.layout, window.layout
    layout = KVLayout(a.k + b.k, a.v + b.v, a.cell_ext, b.n_layer)
    if full.v_trans != window.v_trans:
        full, window = full.token_major(), window.token_major()
    k, v = full.k + window.k, full.v + window.v
    return KVRows(layout, full.positions, k, v, full.ext, full.v_trans)


def blob_size(layout: KVLayout, n: int, *, n_stream: int = 1, v_trans: bool = False) -> int:
    """Bytes of a blob of `n` tokens (the same for both forms of V), without a tail."""
    return PREFIX_BYTES + sum(state_size(part, n, n_stream) for part in layout.sections)


def emit_blob(
    parts: Sequence[KVRows],
    *,
    layout: KVLayout | None = None,
    n_stream: int = 1,
    stream: int = 0,
    v_trans: bool = False,
    seq_id: int = 0,
    tail: bytes = b"",
    out: Any = None,
    n_threads: int = dispatch.THREADS,
) -> memoryview:
    """Compose consecutive parts into one blob that `llama_state_seq_set_data` takes.

    layout: the context's; parts in stored formats are decoded to it. None: all parts have the
    same layout, which is the one to write
    tail: bytes to append, for models that have a state of another kind besides the rows
    out: a writable contiguous buffer to fill from its start (no part may view it); a new one
    if None. Returns exactly the blob's bytes. The copy runs on up to `n_threads` threads with
    the GIL released. StateError if the parts are not consecutive, do not convert to
    `layout` or cannot be framed as asked, or if `out` is too small."""
    frame = StateFrame(n_stream, stream, v_trans, seq_id)
    layout = check_parts(parts, frame, layout)
    n = sum(len(part) for part in parts)
    size = blob_size(layout, n, n_stream=n_stream) + len(tail)
    target = np.empty(size, np.uint8) if out is None else writable(out, size)
    write_prefix(target, seq_id)
    at = PREFIX_BYTES
    for section, rows in zip(layout.sections, _by_section(parts), strict=True):
        end = at + state_size(section, n, n_stream)
        write_state(target[at:end], rows, frame, None, n_threads, section, is_new=out is None)
        at = end
    target[at:] = np.frombuffer(tail, np.uint8)
    return target.data


def _by_section(parts: Sequence[KVRows]) -> list[tuple[KVRows, ...]]:
    return list(zip(*(part.sections() for part in parts), strict=True))


def writable(out: Any, size: int) -> npt.NDArray[np.uint8]:
    """The first `size` bytes of the buffer `out`. StateError if it cannot take them."""
    try:
        view = memoryview(out).cast("B")
    except (TypeError, ValueError) as error:
        raise StateError(f"out is not a contiguous buffer: {error}") from error
    if view.readonly or len(view) < size:
        raise StateError(f"out must be writable and hold {size} bytes; it has {len(view)}")
    return np.frombuffer(view, np.uint8, size)
