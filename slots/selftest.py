"""The start-up check that this llama.cpp still writes the state this package understands."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from towerd.slots.blob import emit_blob, parse_blob
from towerd.slots.errors import StateError
from towerd.slots.layout import STATE_VERSION, KVLayout
from towerd.slots.reader import ByteReader, Data, as_bytes
from towerd.slots.slotfile import FILE_MAGIC
from towerd.slots.state import PREFIX_BYTES, SequenceState


def self_test(blob: Data, positions: npt.ArrayLike, layout: KVLayout) -> None:
    """Parse a blob that llama.cpp just wrote, check it against what is known, and emit it again.

    positions: those that the sequence holds, ascending; layout: that of the model's cache
    Raises StateError that says what differs; this llama.cpp's states must not be used then."""
    try:
        state = parse_blob(blob, cell_ext=layout.cell_ext, layout=layout)
        _check(state, positions, blob, state.to_bytes())
        _check_composed(state)
    except StateError as error:
        raise StateError(
            f"llama.cpp's state is not the version {STATE_VERSION} format that towerd "
            f"supports: {error}"
        ) from error


def check_slot_file(data: Data, blob: Data) -> None:
    """StateError unless `data`, a slot file that llama.cpp just wrote, is of the version that
    this package reads and holds the same state as the `blob` of its sequence."""
    reader = ByteReader(data)
    if reader.u32("magic") != FILE_MAGIC:
        raise StateError("llama.cpp's slot file has another magic")
    version = reader.u32("version")
    if version != STATE_VERSION:
        raise StateError(f"llama.cpp's state is version {version}, not {STATE_VERSION}")
    reader.take(4 * reader.u32("token section size"), "token section")
    state = reader.take(reader.remaining, "state")
    if not np.array_equal(state, as_bytes(blob)[PREFIX_BYTES:]):
        raise StateError("llama.cpp's slot file and its blob hold different states")


def _check(
    state: SequenceState,
    positions: npt.ArrayLike,
    data: Data,
    emitted: bytes,
) -> None:
    if not np.array_equal(state.rows.positions, np.asarray(positions)):
        raise StateError(f"it holds positions {state.rows.p0} to {state.rows.p1 - 1}, not ours")
    if not np.array_equal(as_bytes(emitted), as_bytes(data)):
        raise StateError("parsed and emitted again it is not the same bytes")


def _check_composed(state: SequenceState) -> None:
    """Composing two halves gives the state in position order."""
    rows = state.rows
    halves = rows.is_consecutive and len(rows) > 1
    parts = rows.split(rows.p0 + len(rows) // 2) if halves else (rows,)
    composed = emit_blob(
        parts,
        n_stream=state.frame.n_stream,
        stream=state.frame.stream,
        v_trans=state.frame.v_trans,
        seq_id=state.frame.seq_id,
    )
    again = parse_blob(composed, cell_ext=rows.layout.cell_ext, layout=rows.layout).rows
    if not np.array_equal(again.positions, rows.positions) or not all(
        np.array_equal(a, b) for a, b in zip(again.planes(), rows.planes(), strict=True)
    ):
        raise StateError("two halves composed are not the same rows")
