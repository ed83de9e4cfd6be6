"""Dense attention: the rows of each position can be read and restored by themselves."""

from __future__ import annotations

from towerd.engine.embedded.context.context import Buffer, LlamaContext
from towerd.slots.blob import parse_rows
from towerd.slots.kind import DENSE, StateKind
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows


class PlainMemory:
    """See `SequenceMemory`."""

    def __init__(
        self,
        context: LlamaContext,
        layout: KVLayout,
        kind: StateKind = DENSE,
        tail: bytes = b"",
    ) -> None:
        """tail: the bytes that a blob of rows ends with"""
        self.context = context
        self.layout = layout
        self.kind = kind
        self.tail = tail
        self.n_live = context.n_seqs - 1
        self.scratch = self.n_live

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        self.context.seq_rm(seq, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        self.context.seq_cp(src, dst, p0, p1)

    def can_branch(self, seq: int, n: int) -> bool:
        return True

    def protect(self, seq: int, n: int, n_more: int) -> None:
        """See `SequenceMemory.protect`. No decode can take these rows."""

    def rows(self, seq: int, p0: int, p1: int) -> KVRows | None:
        self.context.seq_cp(seq, self.scratch, p0, p1)
        try:
            blob = self._rows_blob(self.scratch)
        finally:
            self.context.seq_rm(self.scratch)
        return parse_rows(blob, cell_ext=self.layout.cell_ext, layout=self.layout)

    def _rows_blob(self, seq: int) -> Buffer:
        """A sequence's blob up to the end of its rows."""
        return self.context.get_state(seq)

    def append(self, seq: int, blob: Buffer, *, is_empty: bool) -> None:
        if is_empty:
            self.context.set_state(seq, blob)
            return
        self.context.set_state(self.scratch, blob)
        self.context.seq_cp(self.scratch, seq)
        self.context.seq_rm(self.scratch)

    def snapshot(self, seq: int) -> Buffer:
        raise AssertionError("a memory of rows has no state")

    def restore(self, seq: int, state: Buffer) -> None:
        raise AssertionError("a memory of rows has no state")
