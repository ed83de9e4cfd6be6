"""The cold tier's keeper: freezes sessions in idle time and thaws them on demand.

A request announces itself before it runs and takes its leave when its turn is recorded; a session
that a request may be using is never frozen. Freezing runs on one thread of low priority, thawing on
two others, so that a request never waits for a session that is being coded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from towerd.cold.ahead import Ahead
from towerd.cold.coding import Coding
from towerd.cold.freezing import Froze, cold_history, freeze, thaw
from towerd.cold.waits import Waits
from towerd.engine.base import Event, Finish, GenerateRequest, LiveBudget, Progress, Reuse, Started
from towerd.errors import (
    DiskFull,
    InvalidRequest,
    NotFound,
    NotSupported,
    SessionFrozen,
    StoreError,
    TowerdError,
)
from towerd.store import Node, Store
from towerd.store.sessions.cold import SessionBusy
from towerd.store.sessions.turn import SessionInfo
from towerd.tokens import Ids, ids_bytes
from towerd.wakeup import lower_priority

log = logging.getLogger(__name__)

QUIET_S = 5.0
"""Nothing is frozen by itself until no request has run for so long."""
LOOK_S_MAX = 60.0
LOOK_S_MIN = 0.05
RETRY_S = 3600.0
"""After which what could not be frozen is tried again."""
_NO_BUDGET = LiveBudget()
_REFUSALS = (NotFound, NotSupported, InvalidRequest, SessionBusy)

Run = Callable[[GenerateRequest], Coroutine[Any, Any, Finish | None]]
T = TypeVar("T")


class Keeper:
    """Lives on the event loop of a running service; `start` it there."""

    def __init__(
        self,
        store: Store,
        coding: Coding,
        *,
        freeze_after_s: float,
        on_frozen: Callable[[Sequence[Node]], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """freeze_after_s: how long a session must be unused before it is frozen by itself; -1:
        never. on_frozen: told the segments that went, off the loop."""
        self.store = store
        self.coding = coding
        self.freeze_after_s = freeze_after_s
        self.ahead: Ahead | None = None
        self.n_frozen = self.n_thawed = self.n_failed = 0
        self.freeze_s = self.thaw_s = 0.0
        self._on_frozen = on_frozen
        self._clock = clock
        self._uses: dict[int, GenerateRequest] = {}
        self._last_use = float("-inf")
        self._waits = Waits(clock)
        """For what failed, or was thawed without a turn."""
        self._damaged: set[tuple[str, str]] = set()
        """(scope, id) of those that could not be thawed: requests do not try it again."""
        self._freezer = ThreadPoolExecutor(1, "towerd-freeze", initializer=lower_priority)
        self._thawer = ThreadPoolExecutor(2, "towerd-thaw")
        self._counting = threading.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self, run: Run | None = None, n_ctx: int = 0, live: LiveBudget = _NO_BUDGET) -> Ahead:
        """Begin to look for sessions to freeze. Returns what thaws them ahead. `run`: evaluates a background request of less than
        `n_ctx` tokens, under `live`, for what is thawed ahead; None: only its tokens are made
        ready."""
        self.ahead = Ahead(self.store, self.thaw, run, n_ctx, live)
        self._task = asyncio.create_task(self._watch())
        return self.ahead

    async def close(self) -> None:
        """Wait for the current freeze or thaw to end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.ahead is not None:
            await self.ahead.close()
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        for pool in (self._freezer, self._thawer):
            pool.shutdown(cancel_futures=True)
        self.coding.close()

    # ---- requests ---------------------------------------------------------------------------

    def enter(self, request: GenerateRequest) -> Use:
        """A request is about to run: until it leaves, nothing that it uses is frozen."""
        self._uses[id(request)] = request
        return Use(self, request)

    def leave(self, request: GenerateRequest) -> None:
        """Its turn is recorded."""
        if self._uses.pop(id(request), None) is not None and not request.background:
            self._last_use = time.monotonic()

    async def frozen_session(self, request: GenerateRequest) -> str | None:
        """The frozen session that a request continues."""
        if self.store.cold.is_empty or request.precache is not None:
            return None
        return await asyncio.to_thread(self._frozen_session, request)

    def _frozen_session(self, request: GenerateRequest) -> str | None:
        if request.session is not None:
            return self.store.cold.named(request.session, request.scope)
        return self.store.cold.continued_by(ids_bytes(request.ids), request.scope)

    async def thaw_for(self, id: str, request: GenerateRequest) -> int | None:
        """Thaw the session that a request goes on; how many tokens of its prompt are known then,
        None if it stays frozen. The request has its prompt, so nothing that is wrong with the
        session ends it, and a session that is damaged gets its tokens back from the prompt."""
        key = request.scope, id
        try:
            if key not in self._damaged:
                await self.thaw(id, request.scope)
        except NotFound:
            return 0  # removed meanwhile
        except Exception as error:
            unforeseen = None if isinstance(error, TowerdError) else error
            log.error(
                "a frozen session cannot be thawed",
                exc_info=unforeseen,
                extra={"error": str(error)},
            )
            if isinstance(error, NotSupported | DiskFull):
                return None
            self._damaged.add(key)
        if key in self._damaged:
            return 0 if await self._recover(id, request) else None
        match = await asyncio.to_thread(self.store.match, request.ids, request.scope)
        return match.n

    async def _recover(self, id: str, request: GenerateRequest) -> bool:
        prompt = ids_bytes(request.ids)
        try:
            if not await asyncio.to_thread(self.store.cold.recover, id, request.scope, prompt):
                return False
        except StoreError as error:
            log.error("a damaged session is not recovered", extra={"error": str(error)})
            return False
        self._damaged.discard((request.scope, id))
        log.warning("a damaged session got its tokens back from a prompt", extra={"session": id})
        return True

    # ---- sessions ---------------------------------------------------------------------------

    def named(self, id: str | None, scope: str) -> None:
        """A client names a session in passing: if it is frozen, its next prompt is near."""
        if id is not None and self.ahead is not None and not self.store.cold.is_empty:
            self.ahead.opened(id, scope)

    async def freeze(self, id: str, scope: str | None = None) -> Froze | None:
        """Freeze a session now; None if it is frozen already. Raises as `freezing.freeze`, and
        NotSupported."""
        return await self._on(self._freezer, self._freeze, id, scope)

    async def thaw(self, id: str, scope: str | None = None) -> bool:
        """Thaw a session; False if it is not frozen. Raises as `freezing.thaw`, and
        NotSupported."""
        return await self._on(self._thawer, self._thaw, id, scope)

    async def session_ids(self, id: str, scope: str | None = None) -> Ids:
        """Every token of a session's current branch, int32, whether it is frozen or not; it stays
        so. Raises as `thaw`."""
        return await self._on(self._thawer, self._session_ids, id, scope)

    def stats(self) -> dict[str, Any]:
        """Gauges and counters for /metrics and /towerd/v1/stats."""
        return {
            **self.store.cold.stats(),
            "freezes": self.n_frozen,
            "thaws": self.n_thawed,
            "cold_failures": self.n_failed,
            "freeze_seconds": round(self.freeze_s, 6),
            "thaw_seconds": round(self.thaw_s, 6),
            "freeze_after_s": self.freeze_after_s,
            **({} if self.ahead is None else self.ahead.stats()),
        }

    # ---- inside -----------------------------------------------------------------------------

    async def _on(self, pool: ThreadPoolExecutor, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *args)

    def _freeze(self, id: str, scope: str | None) -> Froze | None:
        began = time.monotonic()
        with self._counted_failure():
            self.store.session(id, scope)  # before the vocabulary is loaded
            done = freeze(self.store, self.coding.codec, id, scope, self._may_drop)
        if done is not None:
            self._tell(done)
            with self._counting:
                self.n_frozen += 1
                self.freeze_s += time.monotonic() - began
        return done

    def _tell(self, done: Froze) -> None:
        """Nothing that goes wrong now makes the session less frozen."""
        try:
            self._on_frozen(done.removed)
        except Exception as error:
            log.warning("not all of a frozen session was let go", extra={"error": str(error)})

    def _thaw(self, id: str, scope: str | None) -> bool:
        began = time.monotonic()
        with self._counted_failure():
            info = self.store.session(id, scope)
            if not info.cold_bytes:
                return False
            was_frozen = thaw(self.store, self.coding.codec, id, info.scope)
            self._damaged.discard((info.scope, id))
            self._waits.put_off((info.scope, id), self.freeze_after_s)
        with self._counting:
            self.n_thawed += was_frozen
            self.thaw_s += time.monotonic() - began
        return was_frozen

    def _session_ids(self, id: str, scope: str | None) -> Ids:
        try:
            return self.store.session_ids(id, scope)
        except SessionFrozen:
            history = cold_history(self.store, self.coding.codec, id, scope)
        if history is None:  # thawed just now
            return self.store.session_ids(id, scope)
        return history.ids(history.leaf)

    def _counted_failure(self) -> _Failures:
        return _Failures(self)

    def _may_drop(self, id: str, scope: str, doomed: Sequence[Node]) -> bool:
        """Whether no request that runs may be of this session, or begins with what would go.
        Called under the store's lock."""
        gone, store = {node.id for node in doomed}, self.store
        for request in list(self._uses.values()):
            if request.scope != scope:
                continue
            if request.session is not None:
                if request.session == id:
                    return False
            elif store.recognise(request.ids, scope) == id:
                return False
            elif any(node.id in gone for node in store.match(request.ids, scope).nodes):
                return False
        return True

    def _is_idle(self) -> bool:
        is_used = any(not request.background for request in list(self._uses.values()))
        return not is_used and time.monotonic() - self._last_use >= self._quiet_s

    @property
    def _quiet_s(self) -> float:
        return min(QUIET_S, max(LOOK_S_MIN, self.freeze_after_s))

    async def _watch(self) -> None:
        """Freeze what has been unused for long, one session at a time, while nothing runs."""
        if not self.store.cold.is_empty:
            await self._warm_up()
        while self.freeze_after_s >= 0:
            did_freeze = False
            try:
                did_freeze = self._is_idle() and await self._freeze_oldest()
            except Exception as error:  # it is looked again
                log.warning("no session was frozen", extra={"error": str(error)})
            pause = min(LOOK_S_MAX, max(LOOK_S_MIN, self.freeze_after_s / 4))
            await asyncio.sleep(LOOK_S_MIN if did_freeze else pause)

    async def _warm_up(self) -> None:
        """Build the codec's tables before a request needs them."""
        try:
            await self._on(self._freezer, self._use_codec)
        except Exception as error:  # whatever it is, what is idle is to be frozen
            self.n_failed += 1
            log.warning("frozen sessions cannot be coded here", extra={"error": str(error)})

    def _use_codec(self) -> None:
        codec = self.coding.codec
        codec.decode(codec.encode([0]))

    async def _freeze_oldest(self) -> bool:
        """Freeze the session that was unused for longest; False if there is none to freeze."""
        due = await asyncio.to_thread(self._due)
        if due is None:
            return False
        try:
            await self.freeze(due.id, due.scope)
        except NotFound:
            pass  # removed meanwhile
        except (NotSupported, DiskFull) as error:  # as the next one would be
            log.warning("no session can be frozen now", extra={"error": str(error)})
            await asyncio.sleep(RETRY_S)
        except Exception as error:  # whatever it is, the next one is not to wait for it
            self._waits.put_off((due.scope, due.id), RETRY_S)
            log.warning("a session was not frozen", extra={"error": str(error)})
        return True

    def _due(self) -> SessionInfo | None:
        before = self._clock() - self.freeze_after_s
        found = self.store.cold.idle(before, 1, without=self._waits.now())
        return found[0] if found else None


class Use:
    """One request on its way through the cold tier."""

    def __init__(self, keeper: Keeper, request: GenerateRequest) -> None:
        self._keeper = keeper
        self._request = request
        self._n_known = 0
        self.was_frozen = False
        self.session = request.session
        """What to record its turn under; None: it is recognised then."""

    async def thawing(self) -> AsyncIterator[Progress]:
        """Thaw the session that the request continues. Reports it first if the client asked
        for that."""
        id = await self._keeper.frozen_session(self._request)
        if id is None:
            return
        if self._request.return_progress:
            yield Progress(len(self._request.ids), 0, 0, 0.0)
        self.was_frozen = True
        n_known = await self._keeper.thaw_for(id, self._request)
        if n_known is None:
            self.session = id
        self._n_known = n_known or 0

    def reuse(self, reuse: Reuse) -> Reuse:
        """With the tokens that came from the cold tier, which were evaluated again."""
        n_reused = reuse.live + reuse.hot + reuse.warm
        n_cold = min(self._n_known - n_reused, reuse.prefill)
        return dataclasses.replace(reuse, cold=n_cold) if n_cold > 0 else reuse

    def stamp(self, event: Event) -> Event:
        """An event of the request, its reuse completed."""
        if self.was_frozen and isinstance(event, Started | Finish):
            return dataclasses.replace(event, reuse=self.reuse(event.reuse))
        return event

    def leave(self) -> None:
        """The request's turn is recorded, or it had none."""
        self._keeper.leave(self._request)


class _Failures:
    """Counts what goes wrong in its block, but for what was asked of nobody."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, _REFUSALS):
            self._keeper.n_failed += 1
