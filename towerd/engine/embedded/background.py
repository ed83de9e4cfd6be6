"""Prompts that are evaluated while nobody waits for anything.

They run one at a time, in small steps, only into free cells, and only when nothing else runs,
waits or is to be exported. As soon as something comes they end, and what they have evaluated
stays live for whoever can use it. Called by the inference thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from towerd.engine.embedded.job import Job
from towerd.engine.embedded.pool import LivePool

STEP_MS_MAX = 60.0
"""How long one step may take: a request that comes meanwhile waits that long at most."""
_HEADROOM_CELLS = 256
"""Cells that stay free for the request that is expected next."""


def is_background(job: Job) -> bool:
    """Whether it gives way to every other one."""
    return job.request.background


def nothing_to_evict() -> bool:
    """What such a job gets when it asks for room."""
    return False


class Background:
    """The queue of such jobs. `finish` ends a job with what it has."""

    def __init__(self, pool: LivePool, finish: Callable[[Job], None]) -> None:
        self._pool = pool
        self._finish = finish
        self._waiting: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: Job) -> None:
        """Queue a job."""
        self._waiting.append(job)

    def give_way(self, active: Iterable[Job]) -> None:
        """Something else wants to run."""
        for job in [job for job in active if is_background(job)]:
            self._finish(job)

    def drop(self, *, everything: bool) -> None:
        """End queued jobs that were cancelled, or all."""
        for job in [job for job in self._waiting if everything or job.cancelled]:
            self._waiting.remove(job)
            self._finish(job)

    def next(self) -> Job | None:
        """The next one that fits into the free cells; others end unevaluated."""
        while self._waiting:
            job = self._waiting.popleft()
            _, n_live = self._pool.best_prefix(job.ids, job.request.scope)
            n_new = min(job.n - n_live, job.n_cells)
            if n_new + _HEADROOM_CELLS <= self._pool.cells_free and self._pool.can_open():
                return job
            self._finish(job)
        return None
