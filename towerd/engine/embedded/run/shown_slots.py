"""ShownSlots: what GET /slots shows of the requests that run, and of those that ran last."""

from __future__ import annotations

from towerd.engine.base import SlotView
from towerd.engine.embedded.live.job import Job


class ShownSlots:
    """As many slots as requests run at once; each shows the last job that it had. Of one that has ended only the view
    is kept: what it replied may be large."""

    def __init__(self, n: int, n_ctx: int) -> None:
        self.jobs: list[Job | None] = [None] * n
        """Those that run or were preempted."""
        self.n_tasks = 0
        """How many requests ever had a slot."""
        self._n_ctx = n_ctx
        self._last = [SlotView(i, n_ctx, False, None, 0, 0, None) for i in range(n)]

    def take(self, job: Job, active: list[Job]) -> None:
        """Give `job` its number and a slot that none of `active` has."""
        if job.task < 0:
            job.task = self.n_tasks
            self.n_tasks += 1
        if job.slot < 0 or self.jobs[job.slot] is not job:  # not back from a preemption
            free = (i for i, j in enumerate(self.jobs) if j is None or j not in active)
            job.slot = next(free)
            self.jobs[job.slot] = job

    def leave(self, job: Job) -> None:
        """A job that may have had a slot has ended."""
        if job.slot >= 0 and self.jobs[job.slot] is job:
            self._last[job.slot] = job.view(self._n_ctx)
            self.jobs[job.slot] = None

    def views(self) -> list[SlotView]:
        """What the slots show; may be called by any thread."""
        shown = []
        for i, job in enumerate(list(self.jobs)):
            shown.append(self._last[i] if job is None else job.view(self._n_ctx))
        return shown
