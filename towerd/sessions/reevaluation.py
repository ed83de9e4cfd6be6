"""Reevaluation: makes exact, in idle time, what was answered from moved rows, and measures what it cost.

A conversation that was answered from rows kept behind changed text is evaluated exactly once nothing
else runs, in a background request that any other interrupts. Its rows replace the moved ones, so that
what they cost lasts one turn. The distributions that the answer was sampled from are compared with the
exact ones: that is the drift of what was served. If it exceeds what the fidelity promises, the limit of
what may be kept is tightened.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from towerd.engine.base import Finish, GenerateRequest
from towerd.errors import TowerdError, Unavailable
from towerd.store.sessions.deletions import DeletionWatch
from towerd.tiers.manager import Tiers

log = logging.getLogger(__name__)

SAMPLES_MAX = 1000
"""Measured answers that the figures are of: the last ones."""
_JUDGED_MIN = 8
"""Answers without which the limits are not judged: a few vary by as much as the bound."""
_PAUSE_S = 1.0
"""How long an evaluation that got nowhere waits: the context is full of running requests."""
_TRIES_MAX = 600

WAITING_MAX = 64
"""Conversations that wait for idle time, each with the distributions of its answer. Beyond it the one
that waits longest keeps its moved rows."""

Run = Callable[[GenerateRequest, DeletionWatch], Coroutine[Any, Any, Finish | None]]


class Reevaluator:
    """Belongs to the event loop."""

    def __init__(self, run: Run, tiers: Tiers) -> None:
        """run: evaluates a background request and records its tokens."""
        self._run = run
        self._tiers = tiers
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._excess: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._since_tightened: deque[float] = deque(maxlen=SAMPLES_MAX)
        self.n_tokens = 0
        """Tokens of conversations that were made exact."""

    def answered(self, request: GenerateRequest, finish: Finish, since: DeletionWatch) -> None:
        """Make the conversation exact when the engine is idle, if it was answered from moved rows. What
        an earlier turn of it still waits for is done with it. since: what was deleted since the request
        came, so that nothing of a deleted conversation is recorded again"""
        if finish.served is None or request.live.is_bounded or not finish.session:
            return
        key = f"{request.scope}\n{finish.session}"
        if (earlier := self._tasks.pop(key, None)) is not None:
            earlier.cancel()
        while len(self._tasks) >= WAITING_MAX:
            self._tasks.pop(next(iter(self._tasks))).cancel()
        task = asyncio.create_task(self._make_exact(request, finish, since))
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._forget(key, done))

    async def close(self) -> None:
        """Cancel the work in progress."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stats(self) -> dict[str, Any]:
        """What was measured of served answers, in nats over the model's noise; null before any was."""
        found = np.array(self._excess)
        has_any = len(found) > 0
        return {
            "moved_answers_measured": len(found),
            "moved_answers_waiting": len(self._tasks),
            "moved_tokens_made_exact": self.n_tokens,
            "moved_excess_mean": float(found.mean()) if has_any else None,
            "moved_excess_p99": float(np.quantile(found, 0.99)) if has_any else None,
            "moved_excess_worst": float(found.max()) if has_any else None,
        }

    async def _make_exact(
        self, request: GenerateRequest, finish: Finish, since: DeletionWatch
    ) -> None:
        ids = np.concatenate([request.ids, np.asarray(finish.ids, np.int32)])[: finish.n_cached]
        again = GenerateRequest(
            ids=ids,
            n_predict=0,
            scope=request.scope,
            session=finish.session,
            media=request.media,
            kept_media=request.kept_media,
            background=True,
            may_move=False,
            compare=finish.served,
        )
        done: Finish | None = None
        for _ in range(_TRIES_MAX):
            before = 0 if done is None else done.n_cached
            try:
                done = await self._run(again, since)
            except Unavailable:
                await asyncio.sleep(_PAUSE_S)  # too many requests wait
                continue
            except TowerdError as error:
                log.debug("moved rows cannot be made exact", extra={"error": str(error)})
                return
            if done is None:
                return
            if done.n_cached >= len(ids):
                break
            if done.n_cached <= before:
                await asyncio.sleep(_PAUSE_S)
        else:
            return
        self.n_tokens += len(ids)
        if finish.served is not None and (kl := finish.served.kl) is not None:
            self._measured(kl)

    def _measured(self, kl: float) -> None:
        limits = self._tiers.moved_limits
        if limits is None:
            return
        self._excess.append(kl - limits.floor_kl)
        self._since_tightened.append(kl - limits.floor_kl)
        mean = float(np.mean(self._since_tightened))
        if len(self._since_tightened) >= _JUDGED_MIN and mean > self._tiers.moved_bound:
            self._since_tightened.clear()
            self._tiers.tighten_moves(mean)

    def _forget(self, key: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("making moved rows exact failed", exc_info=error)
