"""CellRoom: makes room in the live context for what the running jobs evaluate next.

Idle sequences leave first; then the youngest running job goes back to the queue.
"""

from __future__ import annotations

from collections import deque

from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.live.pool import LivePool
from towerd.engine.embedded.restore.restorer import Restorer
from towerd.engine.embedded.run.idle import IdleSequences
from towerd.errors import Unavailable


class CellRoom:
    """Moves jobs from the list `active` to the queue `waiting`. Called by the inference thread
    only."""

    def __init__(
        self,
        pool: LivePool,
        restorer: Restorer,
        idle: IdleSequences,
        active: list[Job],
        waiting: deque[Job],
    ) -> None:
        self.n_preemptions = 0
        self._pool = pool
        self._restorer = restorer
        self._idle = idle
        self._active = active
        self._waiting = waiting

    def make(self, n_cells: int) -> bool:
        """Evict idle sequences until `n_cells` are free. False: that was not enough, so a job was
        preempted. Raises Unavailable if no job can give way."""
        while self._pool.cells_free < n_cells:
            if self._idle.evict_one():
                continue
            if self._pool.n_busy() < 2:  # no other job runs or waits to be recorded
                raise Unavailable("The live context is full of running requests; try again later.")
            self.preempt()
            return False
        return True

    def preempt(self) -> None:
        """Push the youngest running job back to the queue; its rows wait in RAM."""
        job = max((j for j in self._active if j.seq is not None), key=lambda j: j.t_submit)
        self._restorer.save(job)
        self.n_preemptions += 1
        job.n_preempted += 1
        self.requeue(job)

    def requeue(self, job: Job) -> None:
        """Put a running job back to the front of the queue, without its sequence."""
        assert job.seq is not None
        self._idle.export_recorded(job.seq)
        self._restorer.drop(job.seq)
        job.seq = None
        job.phase = JobPhase.WAITING
        self._active.remove(job)
        self._waiting.appendleft(job)
