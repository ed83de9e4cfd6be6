"""Anticipation: evaluates the expected beginning of a chat's next request in advance.

A chat template often renders an answer in the next request otherwise than it was generated:
thinking is left out, headers are put in between. From where that differs, the next prompt would
have to be evaluated while its user waits. So when an answer has ended, the conversation is
rendered as the next request will have it, up to the user's words, and the part that differs from
the live tower is evaluated in idle time as a branch of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from towerd.engine.base import Engine, Finish, GenerateRequest
from towerd.errors import TowerdError
from towerd.tokens import Ids, common_prefix

log = logging.getLogger(__name__)

WORTH_TOKENS_MIN = 16
"""Fewer are evaluated beside the user's words in the time of one step."""
BRANCHES_MAX = 64
"""Branches whose fate is watched; the oldest counts as wasted when there are more."""

Run = Callable[[GenerateRequest], Coroutine[Any, Any, Finish | None]]


@dataclass(slots=True)
class _Branch:
    """A prefix that was evaluated ahead: ids[n_old:n_done] were new."""

    scope: str
    ids: Ids
    n_old: int
    n_done: int = 0


class Anticipator:
    """Lives on the event loop. Costs nothing while requests run."""

    def __init__(self, engine: Engine, run: Run, *, tokens_max: int) -> None:
        """run: evaluates a background request and records its tokens; tokens_max: at most so many
        are evaluated ahead for one answer."""
        self._engine = engine
        self._run = run
        self._tokens_max = tokens_max
        self._branches: OrderedDict[str, _Branch] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.n_evaluated = self.n_used = self.n_wasted = 0

    def asked(self, request: GenerateRequest) -> None:
        """A request came: what was made ready for it is used, or not."""
        if request.background:
            return
        for session, branch in list(self._branches.items()):
            if branch.scope != request.scope:
                continue
            n = common_prefix(branch.ids, request.ids)
            if n > branch.n_old or session == _key(request.scope, request.session):
                self._settle(session, n)

    def answered(self, request: GenerateRequest, finish: Finish) -> None:
        """An answer ended: make the next request's beginning ready."""
        if request.chat is None or finish.stop == "cancelled":
            return
        if finish.truncated and not request.live.is_bounded:
            return  # what is live is no prefix of the conversation
        session = _key(request.scope, finish.session)
        running = self._tasks.pop(session, None)
        if running is not None:
            running.cancel()
        task = asyncio.create_task(self._anticipate(session, request, finish))
        self._tasks[session] = task
        task.add_done_callback(lambda done: self._forget(session, done))

    async def close(self) -> None:
        """Cancel the work in progress."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stats(self) -> dict[str, int]:
        """Tokens evaluated ahead, and what became of them; the rest may still be of use."""
        return {
            "anticipations_running": len(self._tasks),
            "anticipated_tokens": self.n_evaluated,
            "anticipated_tokens_used": self.n_used,
            "anticipated_tokens_wasted": self.n_wasted,
        }

    async def _anticipate(self, session: str, request: GenerateRequest, finish: Finish) -> None:
        assert request.chat is not None
        try:
            ids = await request.chat.next_prompt()
            if ids is None:
                return
            tower = np.concatenate([request.ids, np.asarray(finish.ids, np.int32)])
            n_old = common_prefix(ids, tower[: finish.n_cached])
            n_new = min(len(ids) - n_old, self._tokens_max)
            if n_new < WORTH_TOKENS_MIN or n_old + n_new >= self._engine.n_ctx:
                return
            branch = _Branch(request.scope, ids[: n_old + n_new], n_old)
            done = await self._run(
                GenerateRequest(
                    ids=branch.ids, n_predict=0, scope=request.scope, session=finish.session,
                    background=True, live=request.live, media=request.media,
                )
            )  # fmt: skip
        except TowerdError as error:
            log.debug("the next prompt cannot be foreseen", extra={"error": str(error)})
            return
        if done is None or done.n_cached <= n_old:
            return
        if session in self._branches:
            self._settle(session, 0)
        branch.n_done = done.n_cached
        self.n_evaluated += branch.n_done - n_old
        self._branches[session] = branch
        if len(self._branches) > BRANCHES_MAX:
            self._settle(next(iter(self._branches)), 0)

    def _settle(self, session: str, n_common: int) -> None:
        """Count what became of a branch, and stop watching it."""
        branch = self._branches.pop(session)
        n_used = min(max(n_common - branch.n_old, 0), branch.n_done - branch.n_old)
        self.n_used += n_used
        self.n_wasted += branch.n_done - branch.n_old - n_used

    def _forget(self, session: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(session) is task:
            del self._tasks[session]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("anticipation failed", exc_info=error)


def _key(scope: str, session: str | None) -> str:
    return f"{scope}\n{session}"
