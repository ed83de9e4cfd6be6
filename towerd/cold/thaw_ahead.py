"""Thawing ahead: sessions opened, named or predicted become live before their next prompt.

The tokens come back at once; their rows are evaluated in the background, while no request runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from towerd.engine.base import Finish, GenerateRequest, LiveBudget
from towerd.errors import NotFound, TowerdError
from towerd.store import Node, Store
from towerd.store.tree.scope import is_public
from towerd.tiers.prefetch import Prefetch
from towerd.tokens import Ids

log = logging.getLogger(__name__)

REPEAT_S_MIN = 600.0
"""The same segment is evaluated ahead at most this often. Without room the work is wasted."""
ENDS_MAX = 1024
FROZEN_MAX = 1 << 16
"""Removed segments whose frozen session is remembered."""
CONCURRENT_MAX = 4
"""Maximum number of conversations thawed ahead at once. The others wait for their requests."""


class ThawAhead:
    """Thaws and evaluates sessions ahead of their requests. Runs on the event loop;
    `expected_back` may be called by any thread."""

    def __init__(
        self,
        store: Store,
        thaw: Callable[[str, str], Awaitable[bool]],
        run: Callable[[GenerateRequest], Coroutine[Any, Any, Finish | None]] | None,
        n_ctx: int,
        live: LiveBudget,
    ) -> None:
        """thaw: thaws a session and returns whether it was frozen. run: evaluates a background
        request; None: only tokens are thawed. live: the budget of requests that name none."""
        self.n_ahead = 0
        self._store = store
        self._thaw = thaw
        self._run = run
        self._n_ctx = n_ctx
        self._live = live
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._evaluated: OrderedDict[int, float] = OrderedDict()
        self._frozen: OrderedDict[int, tuple[str, str]] = OrderedDict()
        """Segment that was removed -> (id, scope) of the session that was frozen."""
        self._is_open = True

    async def close(self) -> None:
        """Cancel the work in progress."""
        self._is_open = False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def idle(self) -> None:
        """Wait until all work in progress has ended."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def opened(self, id: str, scope: str) -> None:
        """Thaw a session, if it is frozen, because a client viewed or named it."""
        self._spawn(self._open(id, scope))

    def evaluate(self, id: str, scope: str) -> None:
        """Evaluate the rows of a session that was thawed."""
        self._spawn(self._evaluate_session(id, scope))

    def expected_back(self, end: int) -> None:
        """Evaluate the tower of the segment `end`, or thaw the session that it was frozen with: the
        policy expects its reuse, and it has no rows."""
        self._loop.call_soon_threadsafe(self._expected_back, end)

    def prefetch(self, prefetch: Prefetch) -> None:
        """Make live what the next step of a workflow is likely to begin with; from any thread."""
        self._loop.call_soon_threadsafe(self._begin_prefetch, prefetch)

    def remember(self, id: str, scope: str, removed: Sequence[Node]) -> None:
        """Note which segments were removed when a session was frozen; from any thread."""
        found = dict.fromkeys([node.id for node in removed], (id, scope))
        self._loop.call_soon_threadsafe(self._remember, found)

    def stats(self) -> dict[str, int]:
        """Counters."""
        return {"thaws_ahead": self.n_ahead}

    def _remember(self, found: dict[int, tuple[str, str]]) -> None:
        self._frozen.update(found)
        while len(self._frozen) > FROZEN_MAX:
            self._frozen.popitem(last=False)

    def _expected_back(self, end: int) -> None:
        now = time.monotonic()
        is_due = now - self._evaluated.get(end, -REPEAT_S_MIN) >= REPEAT_S_MIN
        if is_due and self._spawn(self._evaluate_tower(end)):
            self._evaluated[end] = now
            self._evaluated.move_to_end(end)
            if len(self._evaluated) > ENDS_MAX:
                self._evaluated.popitem(last=False)

    def _begin_prefetch(self, prefetch: Prefetch) -> None:
        if not self._spawn(self._prefetch(prefetch)):
            prefetch.is_done = True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> bool:
        if len(self._tasks) >= CONCURRENT_MAX or not self._is_open:
            work.close()
            return False
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _open(self, id: str, scope: str) -> None:
        try:
            if await self._thaw(id, scope):
                await self._evaluate_session(id, scope)
        except NotFound:
            return
        except TowerdError as error:
            log.warning("a session was not thawed ahead", extra={"error": str(error)})

    async def _evaluate_session(self, id: str, scope: str) -> None:
        try:
            ids = await asyncio.to_thread(self._store.session_ids, id, scope)
            await self._evaluate(ids, scope, id)
        except TowerdError as error:
            log.debug("a session was not evaluated ahead", extra={"error": str(error)})

    async def _prefetch(self, prefetch: Prefetch) -> None:
        step = prefetch.step
        try:
            tower = await asyncio.to_thread(self._prefix, step.end)
            if tower is not None and not prefetch.is_over:
                await self._evaluate(*tower, None, prefetch)
        except NotFound:
            if (frozen := self._frozen.pop(step.last, None)) is not None:
                await self._open(*frozen)
        except TowerdError as error:
            log.debug("a step was not prefetched", extra={"error": str(error)})
        finally:
            prefetch.is_done = True

    async def _evaluate_tower(self, end: int) -> None:
        try:
            found = await asyncio.to_thread(self._prefix, end)
        except NotFound:
            if (frozen := self._frozen.pop(end, None)) is not None:
                await self._open(*frozen)
            return
        if found is None:
            return
        try:
            await self._evaluate(*found, None)
        except TowerdError as error:
            log.debug("a prompt was not evaluated ahead", extra={"error": str(error)})

    def _prefix(self, end: int) -> tuple[Ids, str] | None:
        """The tokens up to the end of a segment, and its scope; None if it is public. Raises
        NotFound."""
        with self._store.locked():  # a split would show half of a path
            node = self._store.node(end)
            return None if is_public(node.scope) else (node.prefix_ids(), node.scope)

    async def _evaluate(
        self, ids: Ids, scope: str, session: str | None, prefetch: Prefetch | None = None
    ) -> None:
        """Evaluate `ids` in the background."""
        if self._run is not None and 0 < len(ids) < self._n_ctx:
            request = GenerateRequest(
                ids=ids,
                n_predict=0,
                scope=scope,
                session=session,
                background=True,
                live=self._live,
                may_move=prefetch is None,
                prefetch=prefetch,
            )
            done = await self._run(request)
            while prefetch is not None and done is not None and not prefetch.is_over:
                if not 0 < done.n_cached < len(ids):
                    break
                done = await self._run(request)  # a request came in between
            self.n_ahead += done is not None and prefetch is None
