"""ShownSlots: the slots that GET /slots shows, and the number of requests."""

from __future__ import annotations

from towerd.engine.embedded.live.job import Job


class ShownSlots:
    """As many slots as requests run at once; each shows the last job that it had."""

    def __init__(self, n: int) -> None:
        self.jobs: list[Job | None] = [None] * n
        self.n_tasks = 0
        """How many requests ever had a slot."""

    def take(self, job: Job, active: list[Job]) -> None:
        """Give `job` its number and a slot that none of `active` has."""
        if job.task < 0:
            job.task = self.n_tasks
            self.n_tasks += 1
        if job.slot < 0 or self.jobs[job.slot] is not job:  # not back from a preemption
            free = (i for i, j in enumerate(self.jobs) if j is None or j not in active)
            job.slot = next(free)
            self.jobs[job.slot] = job
