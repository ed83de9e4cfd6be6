"""The sequence blob of `llama_state_seq_get_data`: a magic word, a sequence id, the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from towerd.kernels import dispatch
from towerd.slots.compose import Frame, check_parts, state_size, write_state
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout
from towerd.slots.reader import Data, Reader
from towerd.slots.rows import KVRows
from towerd.slots.state import (
    BLOB_MAGIC,
    PREFIX_BYTES,
    SequenceState,
    check_layout,
    parse_state,
    write_prefix,
)

__all__ = ["SequenceState", "blob_size", "emit_blob", "parse_blob"]


def parse_blob(
    data: Data, *, cell_ext: bool = False, layout: KVLayout | None = None
) -> SequenceState:
    """Parse a sequence blob; rows are views into `data` where its order allows.

    cell_ext: the model stores 12 more bytes per cell (nothing in the blob says so)
    layout: what the blob must hold; without it a blob cut exactly between K and V passes as
    one without V
    StateError for anything but one complete plain KV cache sequence, trailing bytes included."""
    reader = Reader(data)
    magic = reader.u32("magic")
    if magic != BLOB_MAGIC:
        raise StateError(f"not a sequence blob: magic is {magic:#010x}, not {BLOB_MAGIC:#010x}")
    seq_id = reader.i32("sequence id")
    state = parse_state(reader, cell_ext=cell_ext)
    if state.seq_id != seq_id:
        raise StateError(f"a blob of sequence {seq_id} holds cells of sequence {state.seq_id}")
    check_layout(state.rows.layout, layout)
    return state


def blob_size(layout: KVLayout, n: int, *, n_stream: int = 1, v_trans: bool = False) -> int:
    """Bytes of a blob of `n` tokens (the same for both forms of V)."""
    return PREFIX_BYTES + state_size(layout, n, n_stream)


def emit_blob(
    parts: Sequence[KVRows],
    *,
    layout: KVLayout | None = None,
    n_stream: int = 1,
    stream: int = 0,
    v_trans: bool = False,
    seq_id: int = 0,
    out: Any = None,
    n_threads: int = dispatch.THREADS,
) -> memoryview:
    """Compose consecutive parts into one blob that `llama_state_seq_set_data` takes.

    layout: the context's, to which parts in stored formats are decoded on the way; None: all
    parts have the same layout, and that is written
    out: a writable contiguous buffer to fill from its start (no part may view it); a new one
    if None. Returns exactly the blob's bytes. The copy runs on up to `n_threads` threads with
    the GIL released. StateError if the parts do not follow one another, do not hold what the
    layout says, cannot be framed so, or `out` is too small."""
    frame = Frame(n_stream, stream, v_trans, seq_id)
    layout = check_parts(parts, frame, layout)
    size = blob_size(layout, sum(len(part) for part in parts), n_stream=n_stream)
    target = np.empty(size, np.uint8) if out is None else writable(out, size)
    write_prefix(target, seq_id)
    write_state(target[PREFIX_BYTES:], parts, frame, None, n_threads, layout)
    return target.data


def writable(out: Any, size: int) -> npt.NDArray[np.uint8]:
    """The first `size` bytes of the buffer `out`. StateError if it cannot take them."""
    try:
        view = memoryview(out).cast("B")
    except (TypeError, ValueError) as error:
        raise StateError(f"out is not a contiguous buffer: {error}") from error
    if view.readonly or len(view) < size:
        raise StateError(f"out must be writable and hold {size} bytes; it has {len(view)}")
    return np.frombuffer(view, np.uint8, size)
