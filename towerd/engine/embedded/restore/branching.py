"""Branching: how a request continues from live rows, or from those in the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from towerd.engine.embedded.context.memory import SequenceMemory
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.live.pool import LivePool, LiveSeq
from towerd.media_ids import whole
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import RestorePlan

Evict = Callable[[], bool]
"""Frees one idle sequence; False if there is none."""


@dataclass(frozen=True, slots=True)
class Found:
    """A request can continue after its first `n` tokens, which `source` has live; None if n is
    0."""

    source: LiveSeq | None = None
    n: int = 0


NOTHING_FOUND = Found()


class Branching(Protocol):
    """Called by the inference thread only."""

    def find(self, job: Job) -> Found:
        """The live sequence to continue from."""
        ...

    def open(self, job: Job, found: Found, capacity: int, evict: Evict) -> LiveSeq | None:
        """A sequence for `capacity` tokens that begins with what was found; None if none is
        available now."""
        ...

    def n_live_prefix(self, job: Job) -> int:
        """How many of the job's tokens are live."""
        ...

    def plan(self, job: Job, seq: LiveSeq, stop: int) -> RestorePlan:
        """Plan what to restore after `seq`, within the job's first `stop` tokens."""
        ...


class TokenBranching:
    """The Branching of memories that can be cut at any token."""

    def __init__(
        self,
        memory: SequenceMemory,
        pool: LivePool,
        tiers: Tiers,
        export: Callable[[LiveSeq], None],
    ) -> None:
        """export: hands the rows of a sequence to the store"""
        self._memory = memory
        self._pool = pool
        self._tiers = tiers
        self._export = export

    def find(self, job: Job) -> Found:
        """See Branching.find. Spliced rows count only if the store has no exact rows instead, and
        never for a prompt that is to be precached."""
        ids, scope = job.ids[: job.n - 1], job.request.scope
        if job.request.precache is not None:
            return self.usable(job, *self._pool.best_prefix(ids, scope, unspliced=True))
        source, n = self._pool.best_prefix(ids, scope)
        if source is not None and source.n_unspliced() < n:
            exact, n_exact = self._pool.best_prefix(ids, scope, unspliced=True)
            if n_exact + self._tiers.plan(job.path, n_exact, job.n_on_path(len(ids))).n >= n:
                source, n = exact, n_exact
        return self.usable(job, source, n)

    def usable(self, job: Job, source: LiveSeq | None, n: int) -> Found:
        """The part of the first `n` tokens of `source` that can be used."""
        n = whole(job.media, n)
        if source is None or (n < source.n and not self._memory.can_branch(source.id, n)):
            return NOTHING_FOUND
        return Found(source, n)

    def n_live_prefix(self, job: Job) -> int:
        """See Branching.n_live_prefix."""
        return self.find(job).n

    def open(self, job: Job, found: Found, capacity: int, evict: Evict) -> LiveSeq | None:
        """See Branching.open. An idle sequence of the same scope that is found whole is taken
        over."""
        source, n, scope = found.source, found.n, job.request.scope
        if source is None or not n:
            return self._pool.open(scope, capacity) if self._can_open(evict) else None
        if not source.busy and n == source.n and source.scope == scope:
            self._pool.grow(source, capacity)
            return source
        was_busy, source.busy = source.busy, True
        try:
            if self._can_open(evict):
                return self._pool.branch(source, n, scope, capacity)
        finally:
            source.busy = was_busy
        if was_busy:
            return None
        # The only idle sequence is the source itself: keep what is shared and continue in it.
        self._export(source)
        self._pool.truncate(source, n)
        source.scope = scope
        self._pool.grow(source, capacity)
        return source

    def _can_open(self, evict: Evict) -> bool:
        return self._pool.can_open() or evict()

    def plan(self, job: Job, seq: LiveSeq, stop: int) -> RestorePlan:
        """See Branching.plan. A plan never ends within a medium."""
        if not job.request.cache_prompt:
            return RestorePlan.nothing()
        plan = self._tiers.plan(job.path, seq.n, job.n_on_path(whole(job.media, stop)))
        seq.n_public = plan.n_public
        n_whole = whole(job.media, seq.n + plan.n)
        if n_whole < seq.n + plan.n:
            plan = self._tiers.plan(job.path, seq.n, n_whole)
        return plan
