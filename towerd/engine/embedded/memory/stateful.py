"""Memories with a state that is valid at one position only: recurrent, hybrid, and whole ones.

llama.cpp's `src/llama-memory-{recurrent,hybrid}.cpp`: a state cannot be cut or shortened, but it
can be copied out, put back, and shared by sequences that go on from the same place.
"""

from __future__ import annotations

import numpy as np

from towerd.engine.embedded.context import PARTIAL, Buffer, LlamaContext
from towerd.slots.blob import parse_rows
from towerd.slots.kind import HYBRID, StateKind
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows
from towerd.slots.state import PREFIX_BYTES


class StatefulMemory:
    """See `Memory`. Of a hybrid, rows and state travel apart; of the others, the state is all."""

    def __init__(
        self, context: LlamaContext, layout: KVLayout, kind: StateKind, tail: bytes = b""
    ) -> None:
        """tail: of a hybrid, what `empty_tail` said"""
        self.context = context
        self.layout = layout
        self.kind = kind
        self.n_live = context.n_seqs - 1
        self.scratch = self.n_live
        self.tail = tail
        self._flags = PARTIAL if kind is HYBRID else 0

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        self.context.seq_rm(seq, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        self.context.seq_cp(src, dst, p0, p1)

    def can_branch(self, seq: int, n: int) -> bool:
        return True

    def protect(self, seq: int, n: int, n_more: int) -> None:
        """Nothing takes them."""

    def rows(self, seq: int, p0: int, p1: int) -> KVRows | None:
        self.context.seq_cp(seq, self.scratch, p0, p1)
        try:
            blob = attention_part(self.context, self.scratch)
        finally:
            self.context.seq_rm(self.scratch)
        return parse_rows(blob, cell_ext=self.layout.cell_ext, layout=self.layout)

    def append(self, seq: int, blob: Buffer, *, is_empty: bool) -> None:
        if is_empty:
            self.context.set_state(seq, blob)
            return
        self.context.set_state(self.scratch, blob)
        self.context.seq_cp(self.scratch, seq)
        self.context.seq_rm(self.scratch)

    def snapshot(self, seq: int) -> Buffer:
        state = self.context.get_state(seq, self._flags)
        state[4:PREFIX_BYTES] = 0  # the sequence id: equal states are equal bytes
        return state

    def restore(self, seq: int, state: Buffer) -> None:
        self.context.set_state(seq, state, self._flags)


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
