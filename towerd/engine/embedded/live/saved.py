"""Saved: the live rows of a preempted job, in RAM until it runs again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from towerd.drift import DecodedRun
from towerd.engine.embedded.context.memory import SequenceMemory
from towerd.engine.embedded.context.places import Places
from towerd.engine.embedded.context.sequences import Buffer
from towerd.engine.embedded.live.live_set import EVERYTHING, LiveSet
from towerd.engine.embedded.live.pool import LivePool, LiveSeq
from towerd.slots.blob import emit_blob
from towerd.slots.labels import head_at_places, label_places
from towerd.slots.rows import KVRows
from towerd.tokens import Ids, Provenances


@dataclass(frozen=True, slots=True)
class Saved:
    """A copy of a sequence that leaves the context although its job is not done. It may hold only
    a part of what the job needs: what follows is planned anew when the job runs again."""

    ids: Ids
    scope: str
    provenance: Provenances
    """uint8[n]: the provenance of each token's rows."""
    decoded: tuple[DecodedRun, ...]
    """See LiveSeq.decoded."""
    rows: KVRows | None
    """The rows of all tokens; None if the memory has none."""
    state: Buffer | None
    """The state after the last token; None if the memory has none."""
    states: dict[int, Buffer]
    """The state checkpoints that the store may lack, by position."""
    places: Places
    """Those of its tokens."""
    live_set: LiveSet = EVERYTHING
    """What was observed, if its chat has a budget."""

    @property
    def n(self) -> int:
        """Tokens that it holds."""
        return len(self.ids)

    def can_extend(self, seq: LiveSeq, n: int) -> bool:
        """Whether its rows can be put behind the first `n` tokens of `seq`, which it shares."""
        is_same = np.array_equal(seq.provenance[:n], self.provenance[:n])
        return self.rows is not None and n > 0 and not seq.is_partial and is_same

    def put_back(self, memory: SequenceMemory, pool: LivePool, seq: LiveSeq) -> None:
        """Put what `seq` lacks of it behind the tokens of `seq`, with which it begins. The cells
        must be free. Raises TowerdError if llama.cpp refuses; `seq` is then of no use."""
        start = seq.n
        if self.rows is not None:
            rows = self.rows.slice(start, self.n)
            emitted = emit_blob([rows], v_trans=memory.context.v_trans, tail=memory.tail)
            blob, head = np.asarray(emitted), rows.head
            if (labels := self.places.between(start, self.n)) is not None:
                label_places(blob, start, labels)
                head = None if head is None else head_at_places(head, start, labels)
            memory.append(seq.id, blob, is_empty=start == 0, head=head)
        pool.append(seq, self.ids[start:], self.provenance[start:])
        seq.decoded = self.decoded
        if self.state is not None:
            memory.restore(seq.id, self.state)
        seq.states |= self.states
        seq.live_set.give_back(self.live_set)


def save(memory: SequenceMemory, seq: LiveSeq) -> Saved | None:
    """Copy a sequence out of the context; None if it holds nothing that a job could continue from:
    rows without the state that belongs to them, or only a part of the rows."""
    n = seq.n
    if not n or seq.is_partial or not seq.is_whole:
        return None
    rows = memory.rows(seq.id, 0, n, seq.places) if memory.kind.has_rows else None
    if rows is None and memory.kind.has_rows:
        return None
    state = memory.snapshot(seq.id) if memory.kind.has_state else None
    return Saved(
        seq.tokens().copy(),
        seq.scope,
        seq.provenance[:n].copy(),
        seq.decoded,
        rows,
        state,
        dict(seq.states),
        seq.places.fork(n),
        seq.live_set,
    )
