"""Exporter: copies the rows that the store lacks out of the live context.

The cost is O(delta): `seq_cp` of a range into a scratch sequence moves no bytes in a unified cache,
and the state calls then see only that range. Called by the inference thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from towerd.engine.embedded.context.memory import SequenceMemory
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.engine.embedded.live.saved import Saved
from towerd.engine.embedded.restore.checkpoints import Checkpoints
from towerd.slots.rows import KVRows
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import Gap
from towerd.tokens import Ids, Provenances

_PIECE_SHARE = 10
"""Of the RAM that is left beside the model, rows that are copied at once take at most one in so many parts."""
_PIECE_TOKENS_MIN = 64
_COPIES = 2
"""How often rows are in RAM while they are copied out of the context."""
_FLUSH_S = 30.0
"""How long running requests wait for rows to be written before more are copied."""


class Exporter:
    """Hands rows and states to the hot tier. `checkpoints` is None for a memory without a state."""

    def __init__(
        self, memory: SequenceMemory, tiers: Tiers, checkpoints: Checkpoints | None
    ) -> None:
        self.bytes_out = 0
        self._memory = memory
        self._tiers = tiers
        self._checkpoints = checkpoints

    def export(self, seq: LiveSeq) -> None:
        """Hand over the rows and states of a sequence that the store lacks, and tell the policy where its
        tower ends."""
        seq.dirty = False
        if not seq.n:
            return
        if self._tiers.ranking.ranks_live:
            self._follow(seq)
        if self._checkpoints is not None:
            self._checkpoints.export(seq)
        if not self._memory.kind.has_rows:
            return
        if seq.is_partial:
            self._export_exact_prefix(seq)
            return
        provenance = seq.provenance[: seq.n]
        for gap in self._gaps(seq.tokens(), seq.scope, provenance):
            rows = self._memory.rows(seq.id, gap.p0, gap.p1, seq.places)
            if rows is not None:
                self._accept(gap, rows)

    def export_saved(self, saved: Saved) -> None:
        """Hand over the rows and states of a preempted job that the store lacks."""
        if self._checkpoints is not None:
            states = saved.states if saved.state is None else saved.states | {saved.n: saved.state}
            self._checkpoints.export_states(saved.ids, saved.scope, saved.provenance, states)
        if saved.rows is not None:
            rows, ids = saved.rows, saved.ids
            self._export_copy(
                ids,
                saved.scope,
                saved.provenance,
                rows.p0,
                lambda p0, p1: rows.slice(p0, p1).copy(),
            )

    def _follow(self, seq: LiveSeq) -> None:
        store = self._tiers.store
        with store.locked():
            match = store.match(seq.tokens(), seq.scope)
            whole = (node.id for node in reversed(match.nodes) if node.p1 <= match.n)
            end = next(whole, None)
        self._tiers.ranking.follow(seq.end, end)
        seq.end = end

    def _export_exact_prefix(self, seq: LiveSeq) -> None:
        """Export the rows of a partial sequence from before its first eviction: only these are what
        prefill computes. Of later tokens the store has the ids alone."""
        exact = seq.live_set.take_exact_prefix()
        if exact is None:
            return
        self._tiers.cut(
            exact.ids, seq.scope
        )  # it ends within a turn, if the first prompt was too long
        self._export_copy(exact.ids, seq.scope, exact.provenance, exact.p0, exact.read)

    def _export_copy(
        self,
        ids: Ids,
        scope: str,
        provenance: Provenances,
        first: int,
        read: Callable[[int, int], KVRows],
    ) -> None:
        """Export what the store lacks of the rows of `ids` from the token numbered `first` on. read: a copy
        of the rows [p0, p1)"""
        for gap in self._gaps(ids, scope, provenance):
            if gap.p0 >= first:
                self._accept(gap, read(gap.p0, gap.p1))

    def _gaps(self, ids: Ids, scope: str, provenance: Provenances) -> Iterator[Gap]:
        """What the store lacks; where RAM is limited in pieces, each once there is room for a copy of it."""
        ram = self._tiers.ram
        if not ram.is_limited:
            yield from self._tiers.gaps(ids, scope, provenance)
            return
        token_bytes = self._tiers.layout.token_bytes
        n_max = max(_PIECE_TOKENS_MIN, ram.room // _PIECE_SHARE // max(1, token_bytes))
        for end in range(n_max, len(ids), n_max):
            self._tiers.cut(ids[:end], scope)
        for gap in self._tiers.gaps(ids, scope, provenance):
            for piece in pieces_of(gap, n_max):
                if not ram.has_room(_COPIES * (piece.p1 - piece.p0) * token_bytes):
                    self._tiers.flush(_FLUSH_S)
                yield piece

    def _accept(self, gap: Gap, rows: KVRows) -> None:
        self.bytes_out += rows.nbytes
        self._tiers.accept(gap, rows)


def pieces_of(gap: Gap, n_max: int) -> Iterator[Gap]:
    """A gap as gaps of at most `n_max` tokens, or one segment."""
    first, p0 = 0, gap.p0
    for i, node in enumerate(gap.nodes):
        if i > first and node.p1 - p0 > n_max:
            yield Gap(gap.nodes[first:i], p0, node.p0, gap.origin)
            first, p0 = i, node.p0
    yield Gap(gap.nodes[first:], p0, gap.p1, gap.origin)
