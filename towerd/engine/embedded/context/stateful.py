"""Memories with a state that is valid at one position only: recurrent, hybrid, and whole ones.

llama.cpp's `src/llama-memory-{recurrent,hybrid}.cpp`: a state cannot be cut or shortened, but it
can be copied out, restored, and shared by sequences that continue from the same position.
"""

from __future__ import annotations

import numpy as np

from towerd.engine.embedded.context.context import PARTIAL, Buffer, LlamaContext
from towerd.engine.embedded.context.plain import PlainMemory
from towerd.slots.kind import HYBRID
from towerd.slots.state import PREFIX_BYTES


class StatefulMemory(PlainMemory):
    """See `SequenceMemory`. A hybrid's rows and state are stored apart; the others have only a
    state."""

    @property
    def _flags(self) -> int:
        return PARTIAL if self.kind is HYBRID else 0

    def _rows_blob(self, seq: int) -> Buffer:
        return attention_part(self.context, seq)

    def snapshot(self, seq: int) -> Buffer:
        state = self.context.get_state(seq, self._flags)
        state[4:PREFIX_BYTES] = 0  # the sequence id: equal states are equal bytes
        return state

    def restore(self, seq: int, state: Buffer) -> None:
        self.context.set_state(seq, state, self._flags)


class StreamMemory(StatefulMemory):
    """See `SequenceMemory`. For whole states in which each sequence has a cache of its own.

    llama.cpp's `src/llama-kv-cache-dsv4.cpp` ends the process when asked to copy a part of a
    sequence, and copies a whole one only at the next decode, when the source may have changed or
    be gone. The bytes are therefore copied here, at once."""

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        self.context.set_state(dst, self.context.get_state(src))


def attention_part(context: LlamaContext, seq: int) -> Buffer:
    """The blob of a hybrid's sequence without the recurrent state at its end."""
    n_state = context.state_size(seq, PARTIAL) - PREFIX_BYTES
    blob = context.get_state(seq)
    return blob[: len(blob) - n_state]


def empty_tail(context: LlamaContext) -> bytes:
    """The recurrent part of a hybrid's blob that holds no state: what rows alone end with.
    The context's last sequence must be empty."""
    part = context.get_state(context.n_seqs - 1, PARTIAL)
    return np.ascontiguousarray(part[PREFIX_BYTES:]).tobytes()
