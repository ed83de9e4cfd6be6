"""Hooks: chooses the hook of each request, and handles the requests of a batch together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.engine.embedded.restore.hook import Hook


class Hooks:
    """The hooks of one model. Called by the inference thread only."""

    def __init__(self, whole: Hook, shift: Hook, bounded: Hook) -> None:
        """The hooks of chats that end with their context, that drop their oldest turns, and that have
        a budget."""
        self._whole = whole
        self._shift = shift
        self._bounded = bounded

    def of(self, live: LiveBudget) -> Hook:
        """The hook of requests with the budget `live`."""
        if live.is_bounded:
            return self._bounded
        return self._shift if live.policy == "shift" else self._whole

    def of_job(self, job: Job) -> Hook:
        """The hook of a job."""
        return self.of(job.request.live)

    def of_seq(self, seq: LiveSeq) -> Hook:
        """The hook of a sequence, by the request that used it last."""
        return self.of(seq.live_set.budget)

    @contextmanager
    def evaluating(self, jobs: list[Job]) -> Iterator[None]:
        """Wraps the evaluation of the batch of `jobs`, which are in the batch's order."""
        mine = [job for job in jobs if self.of_job(job) is self._bounded]
        with self._bounded.evaluating(jobs, mine):
            yield
