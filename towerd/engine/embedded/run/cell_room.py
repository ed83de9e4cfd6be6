"""CellRoom: who has the cells of the live context, and who waits for some.

A waiting job begins if there are cells for it beside those that the running jobs will still need. A
running job is owed the cells of its whole prompt, loaded or evaluated yet or not, and those of the
next tokens of its reply. How long a reply gets is not known, so a part of it is enough; if replies
fill the context nevertheless, idle sequences leave first, and then the youngest running job goes back
to the queue. It begins again with twice that part.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.live.pool import LivePool, LiveSeq
from towerd.engine.embedded.live.saved import Saved
from towerd.engine.embedded.restore.branching import FoundLive
from towerd.engine.embedded.restore.exporter import Exporter
from towerd.engine.embedded.restore.restorer import Restorer
from towerd.errors import Unavailable
from towerd.tokens import common_prefix

log = logging.getLogger(__name__)

EXPORT_EVERY_S = 5.0
"""While streams run, dirty sequences are exported at most this often: it costs them a step."""
IDLE_CELLS_MAX = 256
"""Cells that idle sequences keep while one request runs; n requests allow an n-th of it. On a CPU
every step scans all cells in use for every running request, at about 1.6 us a cell (1B shape);
restoring an idle cell's row from RAM costs 5 us once, as much as scanning it for four tokens.
Twelve chats of 700 tokens in turn (100M shape): 13.5 ms a token with 128 cells, 19 with 1,024."""
_REPLY_TOKENS = 32
"""Tokens of each reply whose cells are kept free at an admission."""
_DOUBLINGS_MAX = 10


class CellRoom:
    """Admits jobs, moves them from the list `active` to the queue `waiting`, and exports and evicts the
    sequences that no request uses. Called by the inference thread only."""

    def __init__(
        self,
        pool: LivePool,
        restorer: Restorer,
        exporter: Exporter,
        active: list[Job],
        waiting: deque[Job],
        n_ctx: int,
        standings: Callable[[], Mapping[int, float]],
    ) -> None:
        """standings: see `Ranking.live_standings`"""
        self.n_preemptions = 0
        self.n_exports = 0
        self._pool = pool
        self._restorer = restorer
        self._exporter = exporter
        self._active = active
        self._waiting = waiting
        self._n_ctx = n_ctx
        self._standings = standings
        self._last_export = 0.0

    # ---- waiting and running jobs -----------------------------------------------------------

    def can_begin(self, job: Job, found: FoundLive) -> bool:
        """Whether the cells that the job needs beside what was found live of it can be had by evicting
        idle sequences, and are not owed to running jobs. A job that is alone may always begin."""
        n_busy = self._pool.cells_busy()
        n_owed = sum(self._n_owed(other) for other in self._active)
        if not n_busy and not n_owed:
            return True
        n_left = self._pool.n_cells - n_busy - n_owed
        source = found.source
        n_held = 0 if source is None else source.live_set.rank(found.n)
        n_wanted = self._n_wanted(job, n_held, 0 if source is None else found.n)
        return n_wanted <= n_left or n_wanted - self._restorer.n_shared(job, found) <= n_left

    def _n_owed(self, job: Job) -> int:
        """The cells that a running job will need beside those that it holds."""
        seq = job.seq
        if seq is None:
            return self._n_wanted(job, 0, 0)
        n_wanted, n_held = self._n_wanted(job, seq.n_cells, seq.n), seq.n_cells
        if job.request.live.is_bounded and n_wanted <= job.request.live.tokens:
            n_held = self._pool.n_own_cells(seq)  # it evicts what it shares with others
        return max(0, n_wanted - n_held)

    def _n_wanted(self, job: Job, n_held: int, n_known: int) -> int:
        n_reply = _REPLY_TOKENS << min(job.n_preempted, _DOUBLINGS_MAX)
        return job.n_cells_wanted(self._n_ctx, n_reply, n_held, n_known)

    def make(self, n_cells: int) -> bool:
        """Evict idle sequences until `n_cells` are free. False: that was not enough, so a job was
        preempted. Raises Unavailable if no job can give way."""
        while self._pool.cells_free < n_cells:
            if self.evict_one():
                continue
            if self._pool.n_busy() < 2:  # no other job runs or waits to be recorded
                raise Unavailable("The live context is full of running requests; try again later.")
            self.preempt()
            return False
        return True

    def preempt(self) -> None:
        """Push the youngest running job back to the queue; its rows wait in RAM."""
        job = max((j for j in self._active if j.seq is not None), key=lambda j: j.t_submit)
        self._restorer.drop_unchecked(job)
        self._restorer.save(job)
        self.n_preemptions += 1
        job.n_preempted += 1
        self.requeue(job)

    def requeue(self, job: Job) -> None:
        """Put a running job back to the front of the queue, without its sequence."""
        assert job.seq is not None
        self._restorer.drop_unchecked(job)
        self.export_recorded(job.seq)
        self._restorer.drop(job.seq)
        job.seq = None
        job.phase = JobPhase.WAITING
        self._active.remove(job)
        self._waiting.appendleft(job)

    # ---- idle sequences ---------------------------------------------------------------------

    @property
    def is_dirty(self) -> bool:
        """Whether an idle sequence may hold rows that the store lacks."""
        return any(s.dirty and not s.busy for s in self._pool)

    @property
    def is_export_due(self) -> bool:
        """Whether the last export is more than `EXPORT_EVERY_S` ago."""
        return time.monotonic() - self._last_export > EXPORT_EVERY_S

    def export_one(self) -> bool:
        """Export the rows of one dirty sequence; False when none is dirty."""
        dirty = [s for s in self._pool if s.dirty and not s.busy]
        if not dirty:
            return False
        self._last_export = time.monotonic()
        self._export(min(dirty, key=lambda s: s.last_used))
        self.n_exports += 1
        return True

    def evict_surplus(self, n_running: int) -> None:
        """Evict an idle sequence if keeping it slows the running requests by more than it saves. What was
        prefetched stays until its step is taken: nothing else has its rows, and they would have to be evaluated again."""
        pool = self._pool
        n_idle = pool.cells_used - pool.cells_busy() - pool.cells_awaiting()
        if n_idle * n_running > IDLE_CELLS_MAX and self._restorer.can_restore_evicted:
            self._evict(self._pool.first_to_leave(self._standings(), spare_prefetched=True))

    def evict_one(self) -> bool:
        """Free the idle sequence that the policy lets go first; False when all sequences are busy."""
        return self._evict(self._pool.first_to_leave(self._standings()))

    def evict_over(self) -> bool:
        """Free an idle sequence that is not expected to be used again; False if there is none."""
        return self._evict(self._pool.first_over(self._standings()))

    def _evict(self, seq: LiveSeq | None) -> bool:
        if seq is None:
            return False
        if seq.prefetch is None or seq.dirty:
            self._export(seq)
        self._restorer.drop(seq)
        return True

    def drop_moved(self, job: Job) -> None:
        """Free idle sequences that hold tokens of a job by moved rows, which it is to replace: a context has
        room for a long chat only once. The rows stay in the store until then."""
        for seq in [each for each in self._pool if not each.busy]:
            n = seq.n_unmoved()
            if n < seq.n and seq.scope == job.request.scope:
                if common_prefix(seq.tokens(), job.ids) > n:
                    self._export(seq)
                    self._restorer.drop(seq)

    def export_recorded(self, seq: LiveSeq) -> None:
        """Export what the store lacks of a sequence that its job gives up: the rows of the turns
        before."""
        if seq.dirty:
            self._export(seq)

    def export_saved(self, saved: Saved) -> None:
        """Export what a job had that was preempted and ended without running again."""
        try:
            self._exporter.export_saved(saved)
        except Exception:
            log.exception("the rows of a preempted request are not stored")

    def _export(self, seq: LiveSeq) -> None:
        """Export `seq`. A failure is logged, so that it does not keep the sequence's cells in
        use."""
        try:
            self._exporter.export(seq)
        except Exception:
            log.exception("the rows of an idle sequence are not stored")
