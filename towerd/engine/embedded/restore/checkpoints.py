"""Checkpoints: continue from state checkpoints, for memories that cannot be cut at any token.

If the store or another sequence has a state checkpoint at position p, the tokens before p need not
be evaluated: their rows, if the memory has any, are shared or appended as always, and the state is
restored after them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from towerd.engine.checkpoint_positions import CheckpointPositions
from towerd.engine.embedded.context.memory import SequenceMemory
from towerd.engine.embedded.context.sequences import Buffer
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.live.parked import Parked
from towerd.engine.embedded.live.pool import LivePool, LiveSeq
from towerd.engine.embedded.restore.branching import Branching, Evict, FoundLive, has_everything
from towerd.errors import StoreError, TowerdError
from towerd.store.rows.checkpoints import StateCheckpoint
from towerd.tiers.checkpoint_tier import CheckpointTier
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import RestorePlan
from towerd.tokens import Ids, Provenance, Provenances, are_exact, are_storable

log = logging.getLogger(__name__)

_BROKEN_MAX = 2
"""Loads of one job that may come up short before it evaluates everything."""


class Checkpoints(Branching):
    """For memories with a state. Used by the inference thread only, except `load`."""

    def __init__(
        self,
        memory: SequenceMemory,
        pool: LivePool,
        tiers: Tiers,
        checkpoint_tier: CheckpointTier,
        positions: CheckpointPositions,
    ) -> None:
        super().__init__(memory, pool, tiers, self.export)
        self.checkpoint_tier = checkpoint_tier
        self._positions = positions

    # ---- in ---------------------------------------------------------------------------------

    def find(self, job: Job) -> FoundLive:
        """See Branching.find."""
        index, ids = self.pool.index, job.ids[: job.n - 1]
        return index.longest(ids, job.request.scope, has_everything, self.n_continuable)

    def n_continuable(self, holder: LiveSeq | Parked, n: int) -> int:
        """See Branching.n_continuable: after all of them, or at a state checkpoint."""
        if not isinstance(holder, LiveSeq):
            return super().n_continuable(holder, n)
        if not holder.is_whole or n == holder.n:
            return n if holder.is_whole else 0
        return max((p for p in holder.states if p <= n), default=0)

    def branched(self, source: LiveSeq, n: int, scope: str, capacity: int) -> LiveSeq:
        """See Branching.branched."""
        if n == source.n or self.memory.kind.has_rows:
            seq = self.pool.branch(source, n, scope, capacity)
        else:
            seq = self.pool.open(scope, capacity)
        if n < source.n and n in source.states:  # else a preempted job brings its own state
            self.memory.restore(seq.id, source.states[n])
        if seq.n == 0:
            self.pool.append(seq, source.ids[:n], source.provenance[:n])
        return seq

    def instead(
        self, source: LiveSeq, n: int, scope: str, capacity: int, evict: Evict
    ) -> LiveSeq | None:
        """See Branching.instead: `source` cannot be cut, so all is evaluated."""
        return self.opened(scope, capacity, evict)

    def plan(self, job: Job, seq: LiveSeq, found: FoundLive, stop: int) -> RestorePlan:
        """See Branching.plan. The plan ends at a position with a checkpoint. Also sets the
        positions at which the job is to take checkpoints."""
        stop = job.n_on_path(stop)
        plan, branches = RestorePlan(), {found.n_common}
        if job.request.cache_prompt and job.n_broken < _BROKEN_MAX:
            stored = self.tiers.plan(job.path, seq.n, stop, worst=Provenance.APPROXIMATE)
            seq.n_public = stored.n_public
            branches.add(stored.n_match)
            if stored.n_match < stop and not job.n_broken and not job.request.background:
                self._positions.learn(job.path, job.ids, stored.n_match)
            end = seq.n + stored.n if self.memory.kind.has_rows else stored.n_match
            checkpoint = self.checkpoint_tier.deepest(job.path, seq.n, end)
            if checkpoint is not None:
                plan = stored.up_to(checkpoint)
        start = seq.n + plan.n
        if self.memory.kind.cut != "whole":  # as large as the conversation: its end is enough
            ids, scope = job.ids[: job.n_prompt], job.request.scope
            job.checkpoints_at = self._positions.of(ids, scope, start, branches)
        return plan

    def load(self, plan: RestorePlan) -> Buffer | None:
        """Read the state of a plan; None if it cannot be read. May be called by any thread."""
        if plan.checkpoint is None:
            return None
        try:
            return self.checkpoint_tier.load(plan.checkpoint)
        except StoreError as error:
            log.warning("a state checkpoint cannot be used", extra={"error": str(error)})
            return None

    def attach(self, seq: LiveSeq, state: Buffer, checkpoint: StateCheckpoint) -> None:
        """Restore the state of a checkpoint after the rows that were loaded. Raises TowerdError if
        llama.cpp refuses it, and lets another take its place (some fit only as many sequences as there
        were)."""
        try:
            self.memory.restore(seq.id, state)
        except TowerdError:
            self.checkpoint_tier.refused(checkpoint)
            raise

    # ---- out --------------------------------------------------------------------------------

    def capture(self, seq: LiveSeq) -> None:
        """Take the state at the end of `seq`, which must not be empty."""
        if seq.n not in seq.states and are_storable(seq.provenance[: seq.n]):
            seq.states[seq.n] = self.memory.snapshot(seq.id)

    def export(self, seq: LiveSeq) -> None:
        """Hand the checkpoints of a sequence to the store."""
        states, seq.states = seq.states, {}
        self.export_states(seq.tokens(), seq.scope, seq.provenance, states)

    def export_states(
        self, ids: Ids, scope: str, provenance: Provenances, states: Mapping[int, Buffer]
    ) -> None:
        """Hand checkpoints to the store: of the tokens `ids`, whose rows have `provenance`, by
        position. Those of a splice or of dropped tokens, and those beyond the end, are left out."""
        taken = {}
        for position, state in states.items():
            if position <= len(ids) and are_storable(provenance[:position]):
                taken[position] = state, not are_exact(provenance[:position])
        self.checkpoint_tier.accept(ids, scope, taken)
