"""Hooks: chooses the hook of each request, and handles the requests of a batch together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.longchat.budgets import Budgets
from towerd.engine.embedded.longchat.hook import Hook
from towerd.engine.embedded.longchat.observer import Observer
from towerd.engine.embedded.longchat.shift import ContextShift
from towerd.engine.embedded.scheduling.job import Job
from towerd.engine.embedded.scheduling.pool import LiveSeq


class Hooks:
    """The hooks of one model. Called by the inference thread only."""

    def __init__(
        self, whole: Hook, shift: ContextShift, budgets: Budgets, observer: Observer | None
    ) -> None:
        """observer: collects the queries; None if no policy uses them"""
        self._whole = whole
        self._shift = shift
        self._budgets = budgets
        self._observer = observer

    def of(self, live: LiveBudget) -> Hook:
        """The hook of requests with the budget `live`."""
        if live.is_bounded:
            return self._budgets
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
        if self._observer is not None:
            self._observer.watch((job, self.of_job(job).n_queries(job)) for job in jobs)
        with self._budgets.evaluating(self._bounded(jobs)):
            yield

    def _bounded(self, jobs: Iterable[Job]) -> list[Job]:
        return [job for job in jobs if self.of_job(job) is self._budgets]
