"""State parts: what a slot file has besides rows, for models whose memory has a state.

    recurrent   [recurrent state]
    hybrid      [rows of the attention layers][recurrent state]
    whole       anything else, kept as llama.cpp wrote it

A state part behind a sequence blob's prefix is the state that `llama_state_seq_get_data` gives of the
same sequence (of a hybrid: its partial state), so both are stored as one checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.slots.errors import StateError
from towerd.slots.kind import HYBRID, RECURRENT, WHOLE, StateKind
from towerd.slots.layout import KVLayout
from towerd.slots.reader import ByteReader
from towerd.slots.state import PREFIX_BYTES, SequenceState, parse_state, write_prefix

Bytes = npt.NDArray[np.uint8]

NO_ROWS = KVLayout((), ())
"""The layout of a kind that keeps no rows."""
_TYPES_MAX = 64
"""ggml's types have smaller numbers."""
_COMPRESSED_MAGIC = 0x34565344
"""Begins the state of llama.cpp's `src/llama-kv-cache-dsv4.cpp`; two more words follow."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotState:
    """The state of a slot at the end of its tokens.

    rows: those of a hybrid's attention layers, of all positions; else None
    part: uint8[n], the state part, a view"""

    kind: StateKind
    rows: SequenceState | None
    part: Bytes

    @property
    def layout(self) -> KVLayout:
        """The layout of its rows."""
        return NO_ROWS if self.rows is None else self.rows.rows.layout

    @property
    def n_stream(self) -> int:
        """Streams of the attention cache that it is framed for; 1 if it has none."""
        if self.rows is not None:
            return self.rows.frame.n_stream
        return 1 if self.kind is RECURRENT else _n_stream(self.part)

    def checkpoint(self) -> Bytes:
        """The state part as a sequence blob, as the embedded engine stores it."""
        out = np.empty(PREFIX_BYTES + len(self.part), np.uint8)
        write_prefix(out, 0)
        out[PREFIX_BYTES:] = self.part
        return out


def find_state(data: Bytes, n: int) -> SlotState:
    """What the state of a slot that holds `n` tokens is. data: a slot file behind its token section.

    Raises StateError: it is empty."""
    if not len(data):
        raise StateError("the slot's state is empty")
    for kind, cell_ext, has_v in (
        (RECURRENT, False, False),
        *((HYBRID, cell_ext, has_v) for has_v in (True, False) for cell_ext in (False, True)),
    ):
        try:
            return parse_slot_state(data, n, kind, cell_ext=cell_ext, has_v=has_v)
        except StateError:
            continue
    return SlotState(WHOLE, None, data)


def parse_slot_state(
    data: Bytes, n: int, kind: StateKind, *, cell_ext: bool = False, has_v: bool = True
) -> SlotState:
    """The state of a slot that holds `n` tokens, of a known `kind`. data: as for `find_state`; cell_ext,
    has_v: see `parse_state`. Raises StateError for anything else."""
    if kind is WHOLE:
        return SlotState(kind, None, data)
    reader, rows = ByteReader(data), None
    if kind is HYBRID:
        rows = parse_state(reader, cell_ext=cell_ext, has_v=has_v, is_last=False)
        if rows.rows.p0 != 0 or not rows.rows.is_consecutive or rows.rows.p1 != n:
            raise StateError(f"{n} tokens, but rows {rows.rows.p0} to {rows.rows.p1 - 1}")
    part = reader.take(reader.remaining, "recurrent state")
    _check_recurrent(part, n)
    return SlotState(kind, rows, part)


def state_part(checkpoint: Bytes) -> Bytes:
    """The state part of a stored checkpoint, a view."""
    return checkpoint[PREFIX_BYTES:]


def _check_recurrent(part: Bytes, n: int) -> None:
    """StateError unless `part` is the recurrent state of one sequence after `n` tokens."""
    reader = ByteReader(part)
    if reader.u32("cell count") != 1:
        raise StateError("a recurrent state holds one cell")
    position, n_seqs = reader.i32("position"), reader.u32("sequence count")
    if position != n - 1 or n_seqs != 0:
        raise StateError(f"a recurrent state of position {position}, not {n - 1}")
    if reader.u32("s_trans") not in (0, 1) or reader.u32("n_layer") == 0:
        raise StateError("a recurrent state without layers")
    while reader.remaining:
        ggml_type = reader.i32("type")
        if not 0 <= ggml_type < _TYPES_MAX:
            raise StateError(f"{ggml_type} is no type of a recurrent state")
        reader.take(reader.u64("row size"), "recurrent row")


def _n_stream(part: Bytes) -> int:
    """Streams that a whole state is framed for. Raises StateError."""
    reader = ByteReader(part)
    first = reader.u32("first word")
    if first != _COMPRESSED_MAGIC:
        return first
    reader.take(8, "version and mode")
    return reader.u32("n_stream")
