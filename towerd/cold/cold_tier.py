"""The cold tier: codes, freezes and thaws sessions.

A request enters before it runs and leaves when its turn is recorded. A session that a running
request may use is never frozen. Freezing runs on one thread of low priority and thawing on two
others, so that a request never waits for a session that is being coded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from towerd.codec.errors import CodecError
from towerd.cold.coding import Coding
from towerd.cold.freezing import FreezeResult, cold_history, freeze, recode, thaw, write_copy
from towerd.cold.thaw_ahead import ThawAhead
from towerd.engine.base import Finish, GenerateRequest, LiveBudget, Reuse
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
from towerd.store.maintenance.space import space
from towerd.store.sessions.cold import is_viewed
from towerd.store.sessions.frozen import CodedSession, SessionBusy
from towerd.store.state.probes import note_probe
from towerd.store.tree.scope import tenant_of
from towerd.system.priority import lower_priority
from towerd.tokens import Ids, ids_bytes

if TYPE_CHECKING:
    from towerd.codec import Codec

log = logging.getLogger(__name__)

_NO_BUDGET = LiveBudget()
_REFUSALS = (NotFound, NotSupported, InvalidRequest, SessionBusy)

Run = Callable[[GenerateRequest], Coroutine[Any, Any, Finish | None]]
T = TypeVar("T")
P = ParamSpec("P")


def _on(
    pool: str,
) -> Callable[
    [Callable[Concatenate[ColdTier, P], T]],
    Callable[Concatenate[ColdTier, P], Coroutine[Any, Any, T]],
]:
    """Makes a coroutine function of a method, which then runs on the tier's threads of this name."""

    def wrapped(
        work: Callable[Concatenate[ColdTier, P], T],
    ) -> Callable[Concatenate[ColdTier, P], Coroutine[Any, Any, T]]:
        @wraps(work)
        async def run(tier: ColdTier, /, *args: P.args, **kwargs: P.kwargs) -> T:
            threads: ThreadPoolExecutor = getattr(tier, pool)
            call = partial(work, tier, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(threads, call)

        return run

    return wrapped


SessionName = tuple[str, str]
"""(scope, id) of a session."""


class Backoff:
    """Sessions and the time until which each is exempt. Thread-safe. Expired entries are removed
    by `active`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[SessionName, float] = {}
        self._lock = threading.Lock()

    def delay(self, key: SessionName, seconds: float) -> None:
        """Exempt a session for `seconds` from now."""
        if seconds > 0:
            with self._lock:
                self._until[key] = self._clock() + seconds

    def active(self) -> set[SessionName]:
        """The sessions that are still exempt. Forgets the others."""
        now = self._clock()
        with self._lock:
            self._until = {key: until for key, until in self._until.items() if until > now}
            return set(self._until)


def check_minis(store: Store, codec: Codec) -> None:
    """Say so if llama.cpp cuts the vocabularies that texts are coded in otherwise than at the last
    start: a blob that follows a base was coded after the base's symbols. Then every session is due."""
    digest = store.state.identity.tokenizer_digest
    for mini in codec.minis():
        if note_probe(store.state, digest, mini.probe(), mini.hash(), mini.written()):
            log.warning(
                "this llama.cpp cuts the codec's vocabulary differently from that of the last start: "
                "copies of conversations are coded again, and frozen ones that begin like others "
                "wait for a client that continues them"
            )


class ColdTier:
    """The frozen sessions of one store. Belongs to the event loop of a running service, where
    `start` must be called."""

    def __init__(
        self,
        store: Store,
        coding: Coding,
        *,
        freeze_after_s: float,
        on_frozen: Callable[[Sequence[Node]], None] = lambda _: None,
        has_checkpoint: Callable[[Node], bool] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """freeze_after_s: how long a session must be unused before a copy in coded form is written
        automatically, and it is frozen once it has no rows; -1: never. on_frozen: receives the
        removed segments, off the event loop. has_checkpoint: whether a state checkpoint is at
        a segment's end; None: the model has none."""
        self.store = store
        self.coding = coding
        self.freeze_after_s = freeze_after_s
        self.ahead: ThawAhead | None = None
        self.n_copied = self.n_frozen = self.n_thawed = self.n_recoded = self.n_failed = 0
        self.freeze_s = self.thaw_s = 0.0
        self._on_frozen = on_frozen
        self._has_checkpoint = has_checkpoint
        self.clock = clock
        self._uses: dict[int, GenerateRequest] = {}
        self._last_use = float("-inf")
        self.backoff = Backoff(clock)
        """Sessions that failed to freeze or were thawed recently."""
        self._damaged: set[tuple[str, str]] = set()
        """(tenant, id) of sessions that could not be thawed; requests do not try again."""
        self._freezer = ThreadPoolExecutor(1, "towerd-freeze", initializer=lower_priority)
        self._thawer = ThreadPoolExecutor(2, "towerd-thaw")
        self._counting = threading.Lock()

    def start(
        self, run: Run | None = None, n_ctx: int = 0, live: LiveBudget = _NO_BUDGET
    ) -> ThawAhead:
        """Make the object that thaws sessions ahead. run: evaluates a background request of fewer
        than `n_ctx` tokens under the budget `live`; None: sessions thawed ahead get only their
        tokens back."""
        self.ahead = ThawAhead(self.store, self.thaw, run, n_ctx, live)
        return self.ahead

    async def stop(self) -> None:
        """Stop thawing ahead. Requests may go on to use the tier."""
        if self.ahead is not None:
            await self.ahead.close()

    async def close(self) -> None:
        """Stop, and wait for the current freeze or thaw to end."""
        await self.stop()
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        for pool in (self._freezer, self._thawer):
            pool.shutdown(cancel_futures=True)
        self.coding.close()

    # ---- requests ---------------------------------------------------------------------------

    def enter(self, request: GenerateRequest) -> RequestGuard:
        """Register a request before it runs. Until it leaves, nothing that it uses is frozen. The
        session that it continues is thawed beside its evaluation."""
        self._uses[id(request)] = request
        return RequestGuard(self, request)

    def leave(self, request: GenerateRequest) -> None:
        """Unregister a request whose turn is recorded, or that had none."""
        if self._uses.pop(id(request), None) is not None and not request.background:
            self._last_use = time.monotonic()

    async def frozen_session(self, request: GenerateRequest) -> str | None:
        """The id of the frozen session that a request continues, if any."""
        if self.store.cold.is_empty or request.precache is not None:
            return None
        return await asyncio.to_thread(self._frozen_session, request)

    def _frozen_session(self, request: GenerateRequest) -> str | None:
        if request.session is not None:
            return self.store.cold.named(request.session, request.scope)
        return self.store.cold.continued_by(ids_bytes(request.ids), request.scope)

    async def thaw_for(self, id: str, request: GenerateRequest) -> int | None:
        """Thaw the session that a request continues. Returns how many tokens of its prompt are
        then known, or None if the session stays frozen. A session that cannot be thawed does not
        end the request, which has its whole prompt; a damaged one recovers its tokens from it."""
        key = tenant_of(request.scope), id
        try:
            if key not in self._damaged:
                await self.thaw(id, request.scope)
        except NotFound:
            return 0  # removed meanwhile
        except Exception as error:
            unexpected = None if isinstance(error, TowerdError) else error
            log.error(
                "a frozen session cannot be thawed",
                exc_info=unexpected,
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
        self._damaged.discard((tenant_of(request.scope), id))
        log.warning("a damaged session got its tokens back from a prompt", extra={"session": id})
        return True

    # ---- sessions ---------------------------------------------------------------------------

    def named(self, id: str | None, scope: str) -> None:
        """Thaw a frozen session ahead because a client named it: its next prompt is likely
        near."""
        if id is not None and self.ahead is not None and not self.store.cold.is_empty:
            self.ahead.opened(id, scope)

    def idle_s(self) -> float:
        """Seconds since the last request of a client ended; 0 while one runs."""
        is_used = any(not request.background for request in list(self._uses.values()))
        return 0.0 if is_used else time.monotonic() - self._last_use

    @_on("_freezer")
    def freeze(
        self, id: str, scope: str | None = None, *, only_without_rows: bool = False
    ) -> FreezeResult | None:
        """Freeze a session now; None if it is already frozen. Raises as `freezing.freeze`, and
        NotSupported. `only_without_rows`: SessionBusy if rows would go."""
        began = time.monotonic()

        def may_drop(id: str, scope: str, doomed: Sequence[Node]) -> bool:
            if only_without_rows and any(
                self.has_rows(node) or is_viewed(self.store.state, node) for node in doomed
            ):
                return False
            return self._may_drop(id, scope, doomed)

        with self._counted_failure():
            self.store.session(id, scope)  # before the vocabulary is loaded
            done = freeze(self.store, self.coding.codec, id, scope, may_drop)
        if done is not None:
            self._damaged.discard((tenant_of(done.scope), done.id))  # an earlier one of its name
            self._notify(done)
            with self._counting:
                self.n_frozen += 1
                self.freeze_s += time.monotonic() - began
        return done

    @_on("_freezer")
    def write_copy(self, id: str, scope: str) -> bool:
        """Write a session in coded form beside its tokens and rows; False if that is done already.
        Raises as `freeze`."""
        began = time.monotonic()
        with self._counted_failure():
            wrote = write_copy(self.store, self.coding.codec, id, scope)
        with self._counting:
            self.n_copied += wrote
            self.freeze_s += time.monotonic() - began
        return wrote

    @_on("_freezer")
    def recode(self, id: str, scope: str | None = None) -> bool:
        """Code a session in coded form again, with today's tables and models; False if it is in
        none. Raises as `freezing.recode`, and NotSupported."""
        with self._counted_failure():
            self.store.session(id, scope)  # before the vocabulary is loaded
            recoded = recode(self.store, self.coding.codec, id, scope)
        with self._counting:
            self.n_recoded += recoded
        return recoded

    @_on("_freezer")
    def is_current(self, session: CodedSession) -> bool:
        """Whether a session's blob needs nothing but today's tables and models. A damaged one is
        not renewed. Raises NotSupported."""
        codec = self.coding.codec
        try:
            return codec.is_current(self.store.cold.blob(session.pk))
        except CodecError:
            return True

    async def warm_up(self) -> None:
        """Build the codec's tables before a request needs them. No failure is raised, because none
        may stop automatic freezing."""
        try:
            await self._use_codec()
        except Exception as error:
            self.n_failed += 1
            log.warning("frozen sessions cannot be coded here", extra={"error": str(error)})

    @_on("_thawer")
    def thaw(self, id: str, scope: str | None = None) -> bool:
        """Thaw a session; False if it is not frozen. Raises as `freezing.thaw`, and
        NotSupported."""
        began = time.monotonic()
        with self._counted_failure():
            info = self.store.session(id, scope)
            if not info.cold_bytes:
                return False
            was_frozen = thaw(self.store, self.coding.codec, id, info.scope)
            self._damaged.discard((tenant_of(info.scope), id))
            self.backoff.delay((info.scope, id), self.freeze_after_s)
        with self._counting:
            self.n_thawed += was_frozen
            self.thaw_s += time.monotonic() - began
        return was_frozen

    @_on("_thawer")
    def read_text(self, read: Callable[..., str], *which: str) -> str:
        """`read(*which)`, which decodes with the codec: it takes its turn among thaws, and the codec
        is not closed before it ends."""
        return read(*which)

    @_on("_thawer")
    def session_ids(self, id: str, scope: str | None = None) -> Ids:
        """The token ids of a session's current branch, int32[n]. A frozen session stays frozen.
        Raises as `thaw`."""
        try:
            return self.store.session_ids(id, scope)
        except SessionFrozen:
            history = cold_history(self.store, self.coding.codec, id, scope)
        if history is None:  # thawed just now
            return self.store.session_ids(id, scope)
        return history.ids(history.leaf)

    def space(self) -> dict[str, Any]:
        """How many tokens resume without prefill, and what a larger disk would keep."""
        found = space(self.store.state, self._has_checkpoint)
        return {**dataclasses.asdict(found), "bytes_wanted": found.bytes_wanted}

    def stats(self) -> dict[str, Any]:
        """Gauges and counters for /metrics and /towerd/v1/stats."""
        return {
            **self.store.cold.stats(),
            "copies": self.n_copied,
            "freezes": self.n_frozen,
            "thaws": self.n_thawed,
            "recodes": self.n_recoded,
            "cold_failures": self.n_failed,
            "freeze_seconds": round(self.freeze_s, 6),
            "thaw_seconds": round(self.thaw_s, 6),
            "freeze_after_s": self.freeze_after_s,
            **({} if self.ahead is None else self.ahead.stats()),
        }

    # ---- inside -----------------------------------------------------------------------------

    def _notify(self, done: FreezeResult) -> None:
        """Report the removed segments. The session is frozen even if this fails."""
        if self.ahead is not None:
            self.ahead.remember(done.id, done.scope, done.removed)
        try:
            self._on_frozen(done.removed)
        except Exception as error:
            log.warning("not all of a frozen session was released", extra={"error": str(error)})

    @_on("_freezer")
    def _use_codec(self) -> None:
        codec = self.coding.codec
        codec.decode(codec.encode([0]))
        check_minis(self.store, codec)

    @contextmanager
    def _counted_failure(self) -> Iterator[None]:
        """Count a failure of the block, except refusals of invalid requests."""
        try:
            yield
        except _REFUSALS:
            raise
        except Exception:
            self.n_failed += 1
            raise

    def has_rows(self, node: Node) -> bool:
        """Whether a segment has rows, in RAM or on disk, or a state checkpoint."""
        return node.has_rows or (self._has_checkpoint is not None and self._has_checkpoint(node))

    def _may_drop(self, id: str, scope: str, doomed: Sequence[Node]) -> bool:
        """Whether no running request may belong to this session, and none holds a segment that
        would be removed, or begins with one. Called under the store's lock."""
        if self.store.holds_any(doomed):
            return False
        gone, store = {node.id for node in doomed}, self.store
        for request in list(self._uses.values()):
            if tenant_of(request.scope) != tenant_of(scope):
                continue
            if request.session is not None:
                if request.session == id:
                    return False
            elif store.recognise(request.ids, request.scope) == id:
                return False
            elif any(node.id in gone for node in store.match(request.ids, request.scope).nodes):
                return False
        return True


class RequestGuard:
    """Protects the sessions of one request from being frozen, and thaws the one it continues.

    The request has its whole prompt, so evaluation needs nothing of the frozen session; what is
    said of reuse does, and so does recording its turn."""

    def __init__(self, tier: ColdTier, request: GenerateRequest) -> None:
        self._tier = tier
        self._request = request
        self._n_known = 0
        self.session = request.session
        """The session to record its turn under, once thawed; None: it is recognised by its
        tokens."""
        self._thawing = asyncio.create_task(self._thaw())

    async def thawed(self) -> None:
        """Wait until the session that the request continues is thawed, or cannot be."""
        await asyncio.shield(self._thawing)

    async def _thaw(self) -> None:
        try:
            id = await self._tier.frozen_session(self._request)
        except StoreError as error:  # the turn is recorded all the same
            log.error("a frozen session cannot be looked up", extra={"error": str(error)})
            return
        if id is None:
            return
        n_known = await self._tier.thaw_for(id, self._request)
        if n_known is None:
            self.session = id
        self._n_known = n_known or 0

    def reuse(self, reuse: Reuse) -> Reuse:
        """`reuse` with the tokens that came from the cold tier, whose rows were evaluated again;
        call it once thawed."""
        n_reused = reuse.live + reuse.hot + reuse.warm
        n_cold = min(self._n_known - n_reused, reuse.prefill)
        return dataclasses.replace(reuse, cold=n_cold) if n_cold > 0 else reuse

    def leave(self) -> None:
        """End the protection: the request's turn is recorded, or it had none."""
        self._tier.leave(self._request)
