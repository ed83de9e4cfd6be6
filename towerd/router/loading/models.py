"""Models: loading and unloading, so that a request waits for its model and none is refused.

A model is loaded in a task of its own, however many requests wait for it. Models that need room
take it one after another, in the order in which they were asked for: the least recently used idle
ones leave; if those that run leave too little, the next request to end is waited for. A model that
is never idle would hold its room for ever: after `PATIENCE_S` it takes no new requests until it has
left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, TypeVar

import msgspec

from towerd.api.http.tenants import CALLER, SOCKET
from towerd.engine.llama_server.process.client import ClientFailure, read_all
from towerd.engine.llama_server.process.silence import LOOK_S, SilenceWatch
from towerd.errors import InvalidRequest, ModelError, NotFound, TowerdError, Unavailable
from towerd.router.loading.entry import ModelEntry
from towerd.router.loading.events import ModelEvents
from towerd.router.loading.metrics import RouterMetrics
from towerd.router.loading.model import RoutedModel, State
from towerd.router.loading.process import STOP_S_MAX, WRITE_S, ModelProcess
from towerd.router.loading.room import Room
from towerd.system.machine import resident_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S = 10.0
"""Before busy models that are in the way take no new requests."""
CHECK_S_MAX = 60.0
"""For reading the header and the vocabulary of a file, also from a slow disk."""
REFUSED_S = 0.1
"""Between two connections to a process that does not accept them."""


class LoadCandidate:
    """A model on its way to being loaded, whose file is checked before others leave for it. The process
    that checked it loads it as well."""

    def __init__(
        self, model: RoutedModel, make: Callable[[RoutedModel], Awaitable[ModelProcess]]
    ) -> None:
        """make: as for `Models`."""
        self.model = model
        self._make = make
        self._process: ModelProcess | None = None
        self._entry: ModelEntry | None = None
        """Whose files `_process` checked."""

    @property
    def needs_check(self) -> bool:
        """Whether the model's file was neither checked nor ever loaded."""
        return not self.model.was_loaded and self._entry is not self.model.entry

    async def check(self) -> None:
        """Check the model's file. Raises TowerdError and OSError: it cannot be loaded."""
        entry = self.model.entry
        await self.close()
        process = self._process = await self._make(self.model)
        await process.check()
        self._entry = entry

    async def take(self) -> ModelProcess:
        """The process to load the model in. Raises TowerdError."""
        process = self._process
        is_checked = process is not None and self._entry is self.model.entry
        if process is None or not is_checked or process.exit_code is not None:
            await self.close()
            return await self._make(self.model)
        self._process = None
        return process

    async def close(self) -> None:
        """End a process that was not taken."""
        process, self._process, self._entry = self._process, None, None
        if process is not None:
            await process.end()


class Models:
    """All models of a router, by name. Event loop only."""

    def __init__(
        self,
        models: Mapping[str, RoutedModel],
        room: Room,
        make: Callable[[RoutedModel], Awaitable[ModelProcess]],
        metrics: RouterMetrics,
    ) -> None:
        """make: gives a process for a model, which is not loaded yet. It may raise TowerdError."""
        self.by_name = dict(models)
        self.room = room
        self.events = ModelEvents()
        self._make = make
        self._metrics = metrics
        self._turn = asyncio.Lock()
        """Who looks for room; fair."""
        self._replacing = asyncio.Lock()
        self._changed = asyncio.Event()
        """Set at the next change, and then another one: whoever waits takes it before looking."""
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._last: RoutedModel | None = None

    # ---- looking ----------------------------------------------------------------------------

    def find(self, name: str) -> RoutedModel | None:
        """The model of a name or alias."""
        if (model := self.by_name.get(name)) is not None:
            return model
        return next((each for each in self.by_name.values() if name in each.entry.aliases), None)

    def loaded(self) -> list[RoutedModel]:
        """Those that are loaded, the one used last first."""
        found = [each for each in self.by_name.values() if each.state is State.LOADED]
        return sorted(found, key=lambda each: -each.last_used_s)

    def last_used(self) -> RoutedModel | None:
        """The one that was used last, loaded or not; None: none was, or it is gone."""
        return self._last

    # ---- requests ---------------------------------------------------------------------------

    async def enter(
        self, model: RoutedModel, *, is_use: bool = True, may_load: bool = True
    ) -> ModelProcess:
        """Begin a request, when its model is loaded; `leave` ends it. is_use: it counts for who was
        used last; others are short, and enter a model that yields as well. may_load: else the model
        is loaded already, or is being loaded. Raises why the model cannot be loaded, InvalidRequest
        if it is not to be, and Unavailable at shutdown and while its process does not answer."""
        if not model.takes_requests:
            model.raise_recent_failure()
        model.n_waiting += 1
        try:
            while not (model.takes_requests if is_use else model.state is State.LOADED):
                if model.is_gone:
                    raise NotFound(f"model '{model.name}' not found: its file is gone")
                if not may_load and not model.is_on_its_way:
                    raise InvalidRequest("model is not loaded")
                await asyncio.shield(self._loading(model))
        finally:
            model.n_waiting -= 1
            self._tell()
        if model.silent:
            raise model.unanswered()
        assert model.process is not None
        model.n_running += 1
        if is_use:
            model.last_used_s, self._last = time.monotonic(), model
        return model.process

    def leave(self, model: RoutedModel, *, is_use: bool = True) -> None:
        """End a request."""
        model.n_running -= 1
        if is_use:
            model.last_used_s = time.monotonic()
        self._tell()
        self._watch_idle(model)

    def _watch_idle(self, model: RoutedModel) -> None:
        """Unload a model that was unused for long enough; look again when it may be."""
        if model.idle_timer is not None:
            model.idle_timer.cancel()
        if model.state is not State.LOADED or model.occupies().is_busy or model.idle_s == inf:
            return
        rest_s = model.last_used_s + model.idle_s - time.monotonic()
        if rest_s > 0:
            loop = asyncio.get_running_loop()
            model.idle_timer = loop.call_later(rest_s, self._watch_idle, model)
        else:
            log.info("unloading an idle model", extra={"model": model.name})
            self.begin_unload(model)

    def is_leaving(self, model: RoutedModel, process: ModelProcess) -> bool:
        """Whether a process was told to end, or has ended."""
        return model.process is not process or model.state is State.STOPPING

    async def refused(self, model: RoutedModel, process: ModelProcess) -> None:
        """A process did not accept a connection: wait until it has ended, if it is ending, or a moment
        for one that has more of them than it can take."""
        log.warning("a model accepted no connection", extra={"model": model.name})
        if model.process is process and model.watch is not None:
            await asyncio.wait((model.watch,), timeout=REFUSED_S)

    def give_up(self, model: RoutedModel, process: ModelProcess) -> None:
        """A process accepts no connections, and did not end either: end it, in order if it can, but do not
        wait for its requests first."""
        if model.process is process and model.state is State.LOADED:
            model.state = State.STOPPING
            self._run(process.stop(time.monotonic() + STOP_S_MAX))

    # ---- loading ----------------------------------------------------------------------------

    def begin_load(self, model: RoutedModel) -> None:
        """Load a model without a request for it; why it fails is logged."""
        model.failure = None

        async def load() -> None:
            try:
                await self.enter(model)
            except TowerdError:
                return
            self.leave(model)

        self._run(load())

    def _loading(self, model: RoutedModel) -> asyncio.Task[None]:
        """The task that loads a model; one however many ask."""
        self._check_open()
        if model.loading is None:
            model.loading = self._task(self._load(model))
            model.loading.add_done_callback(partial(self._loaded, model))
        return model.loading

    def _loaded(self, model: RoutedModel, task: asyncio.Task[None]) -> None:
        model.loading = None
        if not task.cancelled():
            task.exception()  # mark as retrieved: all who waited may have left
        self._tell()

    async def _load(self, model: RoutedModel) -> None:
        candidate = LoadCandidate(model, self._make)
        try:
            async with self._turn:
                if model.takes_requests or not await self._find_room(candidate):
                    return
                model.state, model.is_unwanted, model.loaded_share = State.LOADING, False, 0.0
            self.events.begins(model.name)
            began, entry = time.monotonic(), model.entry
            try:
                await self._start(candidate)
            except Exception as error:
                self._failed(model, entry, error)
                return
        finally:
            await candidate.close()
        took_s = time.monotonic() - began
        self._metrics.loaded(took_s)
        told = {"model": model.name, "seconds": round(took_s, 3)}
        if model.process is not None:  # else it has ended already
            told["pid"] = model.process.pid
        log.info("model loaded", extra=told)
        self.events.has_loaded(model.name, model.info)
        self._watch_idle(model)  # all who waited for it may have left

    async def _start(self, candidate: LoadCandidate) -> None:
        model = candidate.model
        process = model.process = await candidate.take()
        try:
            self._check_wanted(model)
            await process.load(partial(self._progresses, model), model.ram_share)
            model.info = await _model_info(process)
            keeps_to = await _ram_max(process) if self.room.is_limited else 0
            resident = await asyncio.to_thread(resident_bytes, process.pid)
            self._check_wanted(model)
            if process.exit_code is not None:
                raise ModelError(f"The process of the model {model.name} ended while loading.")
        except BaseException:
            await process.end()
            raise
        model.need_bytes = keeps_to or resident + process.chats_bytes
        model.state, model.failure, model.exit_code = State.LOADED, None, 0
        model.was_loaded, model.last_used_s = True, time.monotonic()
        model.watch = self._task(self._watch(model, process))

    def _progresses(self, model: RoutedModel, share: float) -> None:
        model.loaded_share = share
        self.events.progresses(model.name, share)

    def _failed(self, model: RoutedModel, entry: ModelEntry, error: Exception) -> None:
        """Account for a load that failed. Raises why, unless the model has other files now than
        `entry`: whoever waits for it loads those."""
        failure = self._reason(model, error)
        code = None if model.process is None else model.process.exit_code
        if not model.is_unwanted and model.entry is entry:  # else it may be tried again at once
            model.failure, model.failed_s = failure, time.monotonic()
        log.error("model not loaded: %s", failure.message, extra={"model": model.name})
        self._unloaded(model, code if code is not None else 1)
        if model.entry is entry:
            raise failure from None

    def _reason(self, model: RoutedModel, error: Exception) -> TowerdError:
        """Why a load failed: that it was to end comes before how its process ended."""
        try:
            self._check_wanted(model)
        except TowerdError as ordered:
            return ordered
        return error if isinstance(error, TowerdError) else _unforeseen(model, error)

    async def _check(self, candidate: LoadCandidate) -> None:
        """Check a model's file before others leave for it. Raises as `_failed`."""
        model = candidate.model
        entry = model.entry
        try:
            await asyncio.wait_for(candidate.check(), CHECK_S_MAX)
            return
        except TimeoutError:
            said = f"The file of the model {model.name} cannot be read within {CHECK_S_MAX:.0f} s."
            error: Exception = ModelError(said)
        except Exception as refused:
            error = refused
        model.is_unwanted = False
        self.events.begins(model.name)
        self._failed(model, entry, error)

    async def _find_room(self, candidate: LoadCandidate) -> bool:
        """Wait until there is room for a model; False if nobody waits for it any more. Raises why it
        cannot be loaded, before another leaves."""
        model = candidate.model
        deadline_s = time.monotonic() + PATIENCE_S
        await self._measure()
        try:
            while model.n_waiting and not self._is_closing and not model.is_gone:
                changed = self._changed
                others = [each for each in self.by_name.values() if each.is_running]
                if model not in others:
                    occupants = [each.occupies(beside=model) for each in others]
                    verdict = self.room.verdict(model.need_bytes, occupants)
                    if verdict.fits:
                        model.ram_share = self.room.share(occupants)
                        return True
                    if verdict.never:
                        raise _no_room(model, others)
                    if candidate.needs_check:
                        await self._check(candidate)
                        continue  # requests may have entered the others in the meantime
                    for name in verdict.stop:
                        self.begin_unload(self.by_name[name])
                    if time.monotonic() >= deadline_s:
                        self._let_yield(model, others)
                await _wait_for(changed, deadline_s)
            self._check_open()
            return False
        finally:
            for each in self.by_name.values():
                each.is_yielding = False

    async def _measure(self) -> None:
        """What the loaded models take, if it became more."""
        for each in self.loaded():
            if each.process is None:
                continue  # it ended while another was measured
            resident = await asyncio.to_thread(resident_bytes, each.process.pid)
            each.need_bytes = max(each.need_bytes, resident)

    def _let_yield(self, model: RoutedModel, others: Sequence[RoutedModel]) -> None:
        """Those that would leave for a model if they were idle take no new requests."""
        idle = [replace(each.occupies(beside=model), is_busy=False) for each in others]
        for name in self.room.verdict(model.need_bytes, idle).stop:
            self.by_name[name].is_yielding = True

    def _tell(self) -> None:
        """Have those look again that wait for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ---- unloading --------------------------------------------------------------------------

    def begin_unload(self, model: RoutedModel) -> None:
        """Unload a model, in order; one that is being loaded is killed, as llama-server does."""
        if model.state is State.LOADING:
            model.is_unwanted = True
            if model.process is not None:
                model.process.kill()
        elif model.state is State.LOADED:
            assert model.process is not None
            model.state = State.STOPPING
            model.keep_alive.forget()
            self._run(self._stop(model, model.process))

    async def _stop(self, model: RoutedModel, process: ModelProcess) -> None:
        """End a process in order, after its requests, within STOP_S_MAX of now: a request that is on its way
        to it would be lost with the connection, and one that takes longer than the process's own grace
        would be cut off."""
        process.resume()
        deadline_s = time.monotonic() + STOP_S_MAX
        requests_until_s = deadline_s - WRITE_S
        while model.n_running and process.exit_code is None and not self._is_closing:
            if time.monotonic() >= requests_until_s:
                break
            await _wait_for(self._changed, requests_until_s)
        await process.stop(deadline_s)

    def keep_alive(self, model: RoutedModel, seconds: float) -> None:
        """Unload a model, in order, so long after its requests have ended: those that run and those that wait
        for it. One that begins later does not know of it."""
        if model.is_running or model.is_on_its_way:
            model.keep_alive.say(model.keep_alive.begin(), seconds)
            self._watch_idle(model)

    async def _watch(self, model: RoutedModel, process: ModelProcess) -> None:
        silence = asyncio.create_task(_watch_silence(model, process))
        code = await process.wait()
        silence.cancel()
        model.silent = ""
        if model.state is not State.STOPPING:
            self._metrics.crashes.inc()
            log.error("model ended: %s", process.how_it_ended(), extra={"model": model.name})
        else:
            self._metrics.unloads.inc()
            log.info("model unloaded", extra={"model": model.name})
        self._unloaded(model, code)

    def _unloaded(self, model: RoutedModel, code: int) -> None:
        model.state, model.process, model.exit_code = State.UNLOADED, None, code
        self.events.has_ended(model.name, code)
        self._tell()

    # ---- all of them ------------------------------------------------------------------------

    async def replace(self, found: Mapping[str, RoutedModel]) -> None:
        """Serve these models from now on. One that is loaded, and is not among them or has other
        files now, is unloaded first; requests that wait for it get the new one."""
        async with self._replacing:
            old: list[RoutedModel] = []
            for each in self.by_name.values():
                new = found.get(each.name)
                if new is None:
                    each.is_gone = True
                elif new.entry != each.entry:
                    each.become(new)
                else:
                    continue
                old.append(each)
            self._tell()
            await asyncio.gather(*(self._unload_old(each) for each in old))
            self.by_name = {name: self.by_name.get(name, each) for name, each in found.items()}
            if self._last is not None and self._last.is_gone:
                self._last = None
            for each in self.by_name.values():
                if each.state is State.UNLOADED:
                    each.failure, each.exit_code = None, 0
            self.events.send("models_reload", "*")

    async def _unload_old(self, model: RoutedModel) -> None:
        """Let a model finish loading, which requests may wait for; then unload it, in order."""
        if model.state is State.LOADING and model.loading is not None:
            await asyncio.wait((model.loading,))
        if model.state is State.LOADED:
            self.begin_unload(model)
        if model.watch is not None:
            await asyncio.wait((model.watch,))

    async def close(self) -> None:
        """Refuse new requests, let the running ones end, and unload all."""
        self._is_closing = True
        self._tell()
        for model in self.by_name.values():
            self.begin_unload(model)
        while self._tasks:
            await asyncio.wait(self._tasks)
        self.events.close()

    def _check_wanted(self, model: RoutedModel) -> None:
        self._check_open()
        if model.is_unwanted:
            raise ModelError(f"The model {model.name} was unloaded while it was loading.")

    def _check_open(self) -> None:
        if self._is_closing:
            raise Unavailable("The server is shutting down")

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        _ = self._task(work)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that shutting down waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _wait_for(changed: asyncio.Event, deadline_s: float) -> None:
    """Wait for a change, until a deadline that has not passed."""
    wait_s = deadline_s - time.monotonic()
    try:
        await asyncio.wait_for(changed.wait(), wait_s if wait_s > 0 else None)
    except TimeoutError:
        return


async def _watch_silence(model: RoutedModel, process: ModelProcess) -> None:
    """Watch the process of a loaded model, which may be stopped or hang, until cancelled. While it does
    not answer, its requests end with an error and new ones are refused. One for which the others wait
    is killed: what it did not commit is taken back, and the next request loads its model again."""
    named = {"model": model.name, "pid": process.pid}
    watch = SilenceWatch(
        process.answer, pid=lambda: process.pid, is_busy=lambda: model.n_running > 0
    )
    while True:
        model.silent = await watch.until_silent()
        log.error("a model's process %s", model.silent, extra=named)
        await process.drop_requests()
        answering = asyncio.create_task(watch.until_answer())
        try:
            while not answering.done():
                if process.blocks_others():
                    log.error("killed: others wait for it", extra=named)
                    process.kill()
                await asyncio.wait((answering,), timeout=LOOK_S)
        finally:
            answering.cancel()
        model.silent = ""
        log.warning("a model's process answers again", extra=named)


def _unforeseen(model: RoutedModel, error: Exception) -> TowerdError:
    """The error for what no model can be blamed for."""
    if isinstance(error, OSError):
        return ModelError(f"No process can be started: {error.strerror or error}.")
    log.error("a load failed unexpectedly", exc_info=error, extra={"model": model.name})
    return TowerdError(f"The model {model.name} cannot be loaded: the log says why")


def _no_room(model: RoutedModel, others: Sequence[RoutedModel]) -> TowerdError:
    kept = [each for each in others if each.table.keep]
    twin = next((each for each in kept if each.is_twin_of(model)), None)
    if twin is not None:
        return TowerdError(
            f"The model {model.name} is the file of {twin.name}, which is kept loaded with other "
            "settings"
        )
    names = ", ".join(each.name for each in kept)
    return TowerdError(
        f"There is no room for the model {model.name} beside those that are kept: {names}"
    )


async def _model_info(process: ModelProcess) -> dict[str, Any]:
    """What a process says of its model in GET /v1/models. Raises ModelError."""
    return await _said(process, "/v1/models", lambda listed: dict(listed["data"][0]))


async def _ram_max(process: ModelProcess) -> int:
    """The RAM that a process keeps to, with its conversations, in bytes; 0: it has no limit. Raises ModelError."""
    return await _said(
        process, "/towerd/v1/stats", lambda stats: stats["ram"]["ram_bytes_max"] or 0
    )


async def _said(process: ModelProcess, path: str, what: Callable[[Any], T]) -> T:
    """What a process answers. Raises ModelError."""
    try:
        async with asyncio.timeout(CHECK_S_MAX):
            reply = await process.send("GET", path, {CALLER: SOCKET})
            try:
                return what(msgspec.json.decode(await read_all(reply)))
            finally:
                reply.close()
    except (ClientFailure, TimeoutError, msgspec.DecodeError, LookupError) as error:
        raise ModelError(f"The process of a model does not say what it serves: {error}.") from error
