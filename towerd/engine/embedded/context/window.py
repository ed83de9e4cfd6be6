"""Sliding-window attention beside full attention: keeps rows that llama.cpp would overwrite.

The window's layers have a cache of their own, here as large as the other one (`swa_full`). Two
properties of llama.cpp would keep its rows from being cut at any token:

- A sequence's state leaves out window rows that the last position does not see. Read in pieces
  no longer than the window, each piece's last position sees all of it.
- A new token may take the cell of a row that slid out of its window, unless two sequences hold
  the cell (`llama_kv_cache::find_slot`). So every live sequence has a twin that holds on to what
  is about to slide out.

If a row is lost nevertheless, `pos_min` shows it: llama.cpp then forgets everything before it.
"""

from __future__ import annotations

from towerd.engine.embedded.context.context import Buffer, LlamaContext
from towerd.slots.blob import parse_rows
from towerd.slots.kind import WINDOW, StateKind
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows, join


class WindowMemory:
    """See `SequenceMemory`. Of the context's 2 n + 1 sequences the last n are twins."""

    kind: StateKind = WINDOW
    tail = b""

    def __init__(self, context: LlamaContext, layout: KVLayout, window: int) -> None:
        """window: positions that the layers see, at least 1"""
        self.context = context
        self.layout = layout
        self.n_live = (context.n_seqs - 1) // 2
        self.scratch = self.n_live
        self._window = window
        self._held = [0] * self.n_live
        """How many leading positions of each sequence its twin holds too."""

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        self.context.seq_rm(seq, p0, p1)
        self.context.seq_rm(self._twin(seq), p0, p1)
        self._held[seq] = min(self._held[seq], max(p0, 0))

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        self.context.seq_cp(src, dst, p0, p1)
        self._hold_all(dst)

    def can_branch(self, seq: int, n: int) -> bool:
        return self.context.pos_min(seq) <= max(0, n - self._window)

    def protect(self, seq: int, n: int, n_more: int) -> None:
        if n - self._held[seq] + n_more >= self._window:
            self._hold_all(seq)

    def rows(self, seq: int, p0: int, p1: int) -> KVRows | None:
        if self.context.pos_min(seq) > p0:
            return None
        ends = [*range((p0 // self._window + 1) * self._window, p1, self._window), p1]
        starts = [p0, *ends[:-1]]
        return join([self._piece(seq, a, b) for a, b in zip(starts, ends, strict=True)])

    def append(self, seq: int, blob: Buffer, *, is_empty: bool) -> None:
        if is_empty:
            self.context.set_state(seq, blob)
            self._hold_all(seq)
            return
        self.context.set_state(self.scratch, blob)
        self.seq_cp(self.scratch, seq)
        self.context.seq_rm(self.scratch)

    def snapshot(self, seq: int) -> Buffer:
        raise AssertionError("a memory of rows has no state")

    def restore(self, seq: int, state: Buffer) -> None:
        raise AssertionError("a memory of rows has no state")

    def _twin(self, seq: int) -> int:
        return self.n_live + 1 + seq

    def _hold_all(self, seq: int) -> None:
        self.context.seq_cp(seq, self._twin(seq), self._held[seq], -1)
        self._held[seq] = self.context.pos_max(seq) + 1

    def _piece(self, seq: int, p0: int, p1: int) -> KVRows:
        self.context.seq_cp(seq, self.scratch, p0, p1)
        try:
            blob = self.context.get_state(self.scratch)
        finally:
            self.context.seq_rm(self.scratch)
        cell_ext = self.layout.cell_ext
        return parse_rows(blob, cell_ext=cell_ext, has_window=True, layout=self.layout)
