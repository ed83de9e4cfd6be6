"""Admission: whether a waiting job may begin, by the cells that the running ones will still need.

A running job is owed the cells of its whole prompt, loaded or evaluated yet or not, and those of the
next tokens of its reply. How long a reply gets is not known, so a part of it is enough; if replies
fill the context nevertheless, the youngest job is preempted, and begins again with twice that part.
"""

from __future__ import annotations

from collections.abc import Iterable

from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.live.pool import LivePool
from towerd.engine.embedded.restore.branching import FoundLive
from towerd.engine.embedded.restore.restorer import Restorer

_REPLY_TOKENS = 32
"""Tokens of each reply whose cells are kept free at an admission."""
_DOUBLINGS_MAX = 10


class Admission:
    """Called by the inference thread only."""

    def __init__(self, pool: LivePool, restorer: Restorer, n_ctx: int) -> None:
        self._pool = pool
        self._restorer = restorer
        self._n_ctx = n_ctx

    def can_begin(self, job: Job, found: FoundLive, active: Iterable[Job]) -> bool:
        """Whether the cells that the job needs beside what was found live of it can be had by evicting
        idle sequences, and are not owed to `active`. A job that is alone may always begin."""
        n_busy = self._pool.cells_busy()
        n_owed = sum(self._n_owed(other) for other in active)
        if not n_busy and not n_owed:
            return True
        n_left = self._pool.n_cells - n_busy - n_owed
        n_wanted = self._n_wanted(job)
        return n_wanted <= n_left or n_wanted - self._restorer.n_shared(job, found) <= n_left

    def _n_owed(self, job: Job) -> int:
        """The cells that a running job will need beside those that it holds."""
        seq = job.seq
        if seq is None:
            return self._n_wanted(job)
        has_budget = job.request.live.is_bounded  # then it evicts what it shares with others
        n_held = self._pool.n_own_cells(seq) if has_budget else seq.n_cells
        return max(0, self._n_wanted(job) - n_held)

    def _n_wanted(self, job: Job) -> int:
        n_reply = _REPLY_TOKENS << min(job.n_preempted, _DOUBLINGS_MAX)
        return job.n_cells_wanted(self._n_ctx, n_reply)
