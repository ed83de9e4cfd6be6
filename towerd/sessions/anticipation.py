"""Anticipation: evaluates the expected beginning of a chat's next request in advance.

A chat template often renders an answer in the next request differently from how it was generated:
it drops the thinking and inserts headers. From the first difference on, the next prompt would have
to be evaluated while its user waits. When an answer has ended, the conversation is therefore
rendered as the next request will have it, up to the user's words. The part that differs from the
live tower is evaluated in idle time as a branch of its own.
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

NEW_TOKENS_MIN = 16
"""Minimum number of new tokens. Fewer are evaluated in one step together with the user's words."""
BRANCHES_MAX = 64
"""Maximum number of branches tracked. Beyond it the oldest counts as wasted."""

Run = Callable[[GenerateRequest], Coroutine[Any, Any, Finish | None]]


@dataclass(slots=True)
class _Branch:
    """A prefix that was evaluated ahead; ids[n_old:n_done] were new."""

    scope: str
    ids: Ids
    n_old: int
    n_done: int = 0


class Anticipator:
    """Evaluates the next prompts of chats ahead. Belongs to the event loop; its requests run in
    the background only."""

    def __init__(self, engine: Engine, run: Run, *, tokens_max: int) -> None:
        """run: evaluates a background request and records its tokens. tokens_max: maximum number
        of tokens evaluated ahead for one answer."""
        self._engine = engine
        self._run = run
        self._tokens_max = tokens_max
        self._branches: OrderedDict[str, _Branch] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.n_evaluated = self.n_used = self.n_wasted = 0

    def asked(self, request: GenerateRequest) -> None:
        """Count how much of the work done ahead an arriving request uses."""
        if request.background:
            return
        for session, branch in list(self._branches.items()):
            if branch.scope != request.scope:
                continue
            n = common_prefix(branch.ids, request.ids)
            if n > branch.n_old or session == _key(request.scope, request.session):
                self._settle(session, n)

    def answered(self, request: GenerateRequest, finish: Finish) -> None:
        """Evaluate the beginning of the next request after an answer has ended."""
        if request.next_prompt is None or finish.stop == "cancelled":
            return
        if finish.truncated and not request.live.is_bounded:
            return  # the live tokens are not a prefix of the conversation
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
        """Counts of tokens evaluated ahead, used and wasted; the remaining ones are undecided."""
        return {
            "anticipations_running": len(self._tasks),
            "anticipated_tokens": self.n_evaluated,
            "anticipated_tokens_used": self.n_used,
            "anticipated_tokens_wasted": self.n_wasted,
        }

    async def _anticipate(self, session: str, request: GenerateRequest, finish: Finish) -> None:
        assert request.next_prompt is not None
        try:
            ids = await request.next_prompt()
            if ids is None:
                return
            tower = np.concatenate([request.ids, np.asarray(finish.ids, np.int32)])
            n_old = common_prefix(ids, tower[: finish.n_cached])
            n_new = min(len(ids) - n_old, self._tokens_max)
            if n_new < NEW_TOKENS_MIN or n_old + n_new >= self._engine.n_ctx:
                return
            branch = _Branch(request.scope, ids[: n_old + n_new], n_old)
            ahead = GenerateRequest(
                ids=branch.ids,
                n_predict=0,
                scope=request.scope,
                session=finish.session,
                background=True,
                live=request.live,
                media=request.media,
                kept_media=request.kept_media,
                may_move=finish.served is None,  # else all of it is made exact
            )
            done = await self._run(ahead)
        except TowerdError as error:
            log.debug("the next prompt cannot be anticipated", extra={"error": str(error)})
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
        """Count the used and wasted tokens of a branch, and stop tracking it."""
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
