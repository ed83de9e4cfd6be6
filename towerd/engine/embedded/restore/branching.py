"""Branching: how a request continues from live rows, or from those in the store.

Called by the inference thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from towerd.engine.embedded.context.memory import SequenceMemory
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.live.parked import Parked
from towerd.engine.embedded.live.pool import LivePool, LiveSeq
from towerd.engine.live_index import Found
from towerd.media_ids import whole
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import RestorePlan
from towerd.tokens import Provenance

Evict = Callable[[], bool]
"""Frees one idle sequence; False if there is none."""
FoundLive: TypeAlias = Found[LiveSeq | Parked]
NOTHING_FOUND: FoundLive = Found()


class Branching:
    """For memories that can be cut at any token."""

    def __init__(
        self,
        memory: SequenceMemory,
        pool: LivePool,
        tiers: Tiers,
        export: Callable[[LiveSeq], None],
    ) -> None:
        """export: hands what the store lacks of a sequence to it"""
        self.memory = memory
        self.pool = pool
        self.tiers = tiers
        self._export = export

    def find(self, job: Job) -> FoundLive:
        """The live sequence to continue from. Moved rows count only if the store has no exact rows
        instead, and never for a request that may not have them."""
        ids, scope, longest = job.ids[: job.n - 1], job.request.scope, self.pool.index.longest
        if not job.request.takes_moved:
            return self.usable(job, longest(ids, scope, has_everything, n_unmoved))
        found = longest(ids, scope, has_everything, n_settled)
        if found.source is not None and n_unmoved(found.source, found.n) < found.n:
            exact = longest(ids, scope, has_everything, n_unmoved)
            stop = job.n_on_path(len(ids))
            stored = self.tiers.plan(job.path, exact.n, stop, worst=Provenance.APPROXIMATE)
            if exact.n + stored.n >= found.n:
                found = exact
        return self.usable(job, found)

    def n_continuable(self, holder: LiveSeq | Parked, n: int) -> int:
        """After how many of its first `n` tokens, at most, a holder can be continued."""
        return n if isinstance(holder, LiveSeq) or n >= holder.n_min else 0

    def usable(self, job: Job, found: FoundLive) -> FoundLive:
        """The part of what was found that can be used."""
        source, n = found.source, whole(job.media, found.n)
        if isinstance(source, LiveSeq):
            is_there = n == source.n or self.memory.can_branch(source.id, source.place_of(n))
            return Found(source, n, n) if n and is_there else NOTHING_FOUND
        return found

    def open(self, job: Job, found: FoundLive, capacity: int, evict: Evict) -> LiveSeq | None:
        """A sequence for `capacity` tokens that begins with what was found; None if none is available
        now. An idle sequence of the same scope that is found whole is taken over."""
        source, n, scope = found.source, found.n, job.request.scope
        if source is None:
            return self.opened(scope, capacity, evict)
        assert isinstance(source, LiveSeq)
        if not source.busy and n == source.n and source.scope == scope:
            self.pool.grow(source, capacity)
            return source
        was_busy, source.busy = source.busy, True
        try:
            if self.pool.can_open() or evict():
                return self.branched(source, n, scope, capacity)
        finally:
            source.busy = was_busy
        return self.instead(source, n, scope, capacity, evict)

    def opened(self, scope: str, capacity: int, evict: Evict) -> LiveSeq | None:
        """An empty sequence; None if none is available now."""
        return self.pool.open(scope, capacity) if self.pool.can_open() or evict() else None

    def branched(self, source: LiveSeq, n: int, scope: str, capacity: int) -> LiveSeq:
        """A new sequence with the first `n` tokens of `source`."""
        return self.pool.branch(source, n, scope, capacity)

    def instead(
        self, source: LiveSeq, n: int, scope: str, capacity: int, evict: Evict
    ) -> LiveSeq | None:
        """What is opened if no sequence is free beside `source`: itself, with what is shared."""
        if source.busy:
            return None
        self._export(source)
        self.pool.truncate(source, n)
        source.scope = scope
        self.pool.grow(source, capacity)
        return source

    def plan(self, job: Job, seq: LiveSeq, found: FoundLive, stop: int) -> RestorePlan:
        """Plan what to restore after `seq`, within the job's first `stop` tokens. A plan never ends
        within a medium."""
        if not job.request.cache_prompt:
            return RestorePlan()
        stop, worst = job.n_on_path(whole(job.media, stop)), worst_for(job)
        plan = self.tiers.plan(job.path, seq.n, stop, worst=worst)
        # Others may share public tokens only up to the first whose live rows were moved.
        n_exact = seq.n_unmoved()
        seq.n_public = plan.n_public if n_exact == seq.n else min(n_exact, plan.n_public)
        n_whole = whole(job.media, seq.n + plan.n)
        if n_whole < seq.n + plan.n:
            plan = self.tiers.plan(job.path, seq.n, n_whole, worst=worst)
        return plan


def worst_for(job: Job) -> Provenance:
    """The worst provenance of stored rows that a job may continue from."""
    return Provenance.AFTER_MOVED if job.request.takes_moved else Provenance.APPROXIMATE


def has_everything(holder: LiveSeq | Parked) -> bool:
    """Whether each of its tokens is live."""
    return isinstance(holder, LiveSeq) and not holder.is_partial


def n_settled(holder: LiveSeq | Parked, n: int) -> int:
    """How many of its first `n` tokens stay what they are: moved ones of a running request may be refused
    yet."""
    assert isinstance(holder, LiveSeq)
    return min(n, holder.n_unmoved()) if holder.busy else n


def n_unmoved(holder: LiveSeq | Parked, n: int) -> int:
    """How many of its first `n` tokens are before the first moved one."""
    assert isinstance(holder, LiveSeq)
    return min(n, holder.n_unmoved())
