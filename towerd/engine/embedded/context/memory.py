"""The protocol between the live tier and a context's memory."""

from __future__ import annotations

from typing import Protocol

from towerd.engine.embedded.context.context import Buffer, LlamaContext
from towerd.slots.kind import StateKind
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows


class SequenceMemory(Protocol):
    """Sequences [0, n_live) are the pool's; `scratch` is the one beside them that rows pass
    through. Called by the inference thread only."""

    context: LlamaContext
    kind: StateKind
    layout: KVLayout
    """Layout of the rows; without layers if the kind has no rows."""
    tail: bytes
    """What a blob of rows must end with."""
    n_live: int
    scratch: int

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Take positions [p0, p1) out of a sequence. Raises TowerdError where only all can."""
        ...

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Share the cells [p0, p1) of `src` with `dst`; a recurrent state comes along whole."""
        ...

    def can_branch(self, seq: int, n: int) -> bool:
        """Whether all of the first `n` positions of a sequence are there to continue from."""
        ...

    def protect(self, seq: int, n: int, n_more: int) -> None:
        """Make sure that the rows of the `n` positions of `seq` outlive `n_more` decodes."""
        ...

    def rows(self, seq: int, p0: int, p1: int) -> KVRows | None:
        """The rows [p0, p1), copied out; None if some of them are gone. Needs `has_rows`."""
        ...

    def append(self, seq: int, blob: Buffer, *, is_empty: bool) -> None:
        """Put the rows of a blob behind what `seq` holds. Raises TowerdError."""
        ...

    def snapshot(self, seq: int) -> Buffer:
        """The state that is valid exactly where the sequence ends. Needs `has_state`."""
        ...

    def restore(self, seq: int, state: Buffer) -> None:
        """Make a snapshot the sequence's state; its rows, if the kind has any, must end where
        the state does. Raises TowerdError."""
        ...
