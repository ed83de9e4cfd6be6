"""Background jobs: prompts that are evaluated while the engine is otherwise idle.

They run one at a time, in small steps, only into free cells, and only when nothing else runs,
waits or is to be exported. They end as soon as a request comes, in the middle of a step if the
memory allows it; the tokens that they have evaluated stay live, for any request to use. Called by
the inference thread only, except `interrupt`.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from towerd.engine.embedded.context.context import Interrupted
from towerd.engine.embedded.context.memory import SequenceMemory
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.live.live_set import EVERYTHING
from towerd.engine.embedded.live.pool import LivePool
from towerd.engine.embedded.restore.restorer import Restorer
from towerd.model.llama_log import demoted_log
from towerd.slots.kind import DENSE
from towerd.wire import Interruption

STEP_MS_MAX = 60.0
"""How long one step should take: a request that comes meanwhile wastes at most that much work, or
waits that long if the step cannot be interrupted."""
_HEADROOM_CELLS = 256
"""Cells that stay free for the request that is expected next."""


class Inbox(queue.SimpleQueue[Callable[[], None]]):
    """Commands in the order they came. Any thread may put one; one thread takes and runs them."""

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """A future of what `work` returns or raises. If it is cancelled first, `work` is not
        run."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self.put(run)
        return future


def is_background(job: Job) -> bool:
    """Whether a job gives way to all that are not background jobs."""
    return job.request.background


def nothing_to_evict() -> bool:
    """The `evict` of background jobs: nothing is evicted for them."""
    return False


class Background:
    """The queue of background jobs."""

    def __init__(
        self,
        memory: SequenceMemory,
        pool: LivePool,
        restorer: Restorer,
        inbox: Inbox,
        finish: Callable[[Job], None],
        drop_moved: Callable[[Job], None],
        evict_over: Callable[[], bool],
    ) -> None:
        """inbox: where requests come in; finish: ends a job with what it has; drop_moved, evict_over: see
        `CellRoom`."""
        self._memory = memory
        self._pool = pool
        self._restorer = restorer
        self._inbox = inbox
        self._finish = finish
        self._drop_moved = drop_moved
        self._evict_over = evict_over
        self._waiting: deque[Job] = deque()
        self._interruption = Interruption(memory.context.address)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: Job) -> None:
        """Queue a job."""
        self._waiting.append(job)

    def interrupt(self) -> None:
        """Interrupt a step of background jobs, for a command in the inbox. May be called by any
        thread."""
        self._interruption.ask()

    @contextmanager
    def interruptible(self, jobs: list[Job]) -> Iterator[None]:
        """Wraps the evaluation of a batch of `jobs`, which `interrupt` can end if they are
        background jobs. Raises Interrupted; the context then holds what it held before."""
        if not all(is_background(job) and self._can_interrupt(job) for job in jobs):
            yield
            return
        self._interruption.arm()
        try:
            if not self._inbox.empty():
                raise Interrupted
            with demoted_log():
                yield
        except Interrupted:
            for job in jobs:
                if job.seq is not None:
                    self._memory.seq_rm(job.seq.id, job.seq.place_next)
            raise
        finally:
            self._interruption.disarm()

    def _can_interrupt(self, job: Job) -> bool:
        """Whether its evaluation changes nothing but the rows at the end of its sequence."""
        if self._memory.kind is not DENSE or job.seq is None:
            return False
        return job.seq.live_set is EVERYTHING

    def give_way(self, active: Iterable[Job]) -> None:
        """End the running background jobs, because a request waits."""
        for job in [job for job in active if is_background(job)]:
            self._finish(job)

    def drop(self, *, everything: bool) -> None:
        """End queued jobs that were cancelled, or all."""
        for job in [job for job in self._waiting if everything or job.is_cancelled]:
            self._waiting.remove(job)
            self._finish(job)

    def _fits(self, job: Job) -> bool:
        """Whether there are cells and a sequence for what is not live of it."""
        n_new = min(job.n - self._restorer.find(job).n_common, job.n_cells)
        return n_new + _HEADROOM_CELLS <= self._pool.cells_free and self._pool.can_open()

    def next(self) -> Job | None:
        """The next job that fits into the free cells; those before it end unevaluated."""
        while self._waiting:
            job = self._waiting.popleft()
            if job.request.compare is not None and not self._fits(job):
                self._drop_moved(job)
            if job.request.prefetch is not None and not self._has_room(job):
                self._finish(job)
            elif self._fits(job):
                return job
            else:
                self._finish(job)
        return None

    def _has_room(self, job: Job) -> bool:
        """Whether something of a prefetch is not live, for which there is room or can be made."""
        if self._restorer.find(job).n_common >= job.n - 1:
            return False
        while not self._fits(job):
            if not self._evict_over():
                return False
        return True
