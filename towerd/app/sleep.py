"""Sleeper: unloads the model of an idle daemon, and loads it for the next request.

All that the service has open is closed in order as at the end of the daemon: nothing that was promised to a
client is lost, and a daemon that is killed while it sleeps has nothing to lose.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from math import inf
from typing import TypeAlias

from aiohttp import web

from towerd.api.http.gate import LEAVING, ApiService, Asleep
from towerd.api.http.keys import CONFIG, GATE, LIMITS
from towerd.api.llama import info
from towerd.api.llama.slots import BOOK
from towerd.api.llama.task import RUNNING
from towerd.app.loop import tune_gc
from towerd.errors import TowerdError, Unavailable

log = logging.getLogger(__name__)

Opened: TypeAlias = AbstractAsyncContextManager[ApiService]
NOT_WOKEN = "The model could not be loaded again; the daemon's log says why"
READ_S = 0.05
"""The pause while something is read of what is to be unloaded."""
RETRY_S = 1.0
"""The pause after a model could not be asked what is answered while it sleeps."""


class Sleeper:
    """Keeps the service open, or closed while it sleeps, until the daemon stops. Event loop only."""

    def __init__(
        self,
        app: web.Application,
        opened: Opened,
        open_service: Callable[[], Awaitable[Opened]],
        stopping: asyncio.Event,
    ) -> None:
        """opened: the open service, which is this object's to close"""
        config = app[CONFIG]
        self._app, self._gate = app, app[GATE]
        self._opened: Opened | None = opened
        self._open_service = open_service
        self._stopping = stopping
        # A router unloads its models itself.
        is_timed = config.sleep_idle_seconds > 0 and not config.behind_router
        self._idle_s = config.sleep_idle_seconds if is_timed else inf

    async def serve(self) -> None:
        """Let the model sleep and wake until the daemon stops."""
        while not self._stopping.is_set():
            if self._opened is None:
                await self._first_of(self._gate.is_wanted)
                await self._wake()
            elif (rest_s := self._rest_s()) > 0:
                await self._first_of(self._gate.has_new_rest, within_s=rest_s)
                self._gate.has_new_rest.clear()
            else:
                await self._sleep()
        self._gate.not_woken(Unavailable(LEAVING))

    async def close(self) -> None:
        """Close the service, if it is open."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.__aexit__(None, None, None)

    def _rest_s(self) -> float:
        """Seconds until the model may sleep, or is looked at again; infinite if it never may."""
        told_s = self._gate.keep_alive_s
        idle_s = self._idle_s if told_s is None else told_s
        if self._gate.is_used:
            # The end of a use is told where a request has set the time.
            return inf if told_s is not None else idle_s or inf
        if self._app[RUNNING]:
            return max(idle_s, READ_S)  # a stream that outlives its client
        return idle_s - self._gate.idle_s()

    async def _asleep(self) -> Asleep | None:
        try:
            if self._app[CONFIG].engine == "llama-server":
                from towerd.api.relay.routes import asleep

                return await asleep(self._app)
            return await info.asleep(self._app)
        except TowerdError as error:
            log.warning("the model does not sleep: %s", error.message)
            await asyncio.sleep(RETRY_S)
            return None

    async def _sleep(self) -> None:
        asleep = await self._asleep()
        if asleep is None or self._rest_s() > 0 or self._stopping.is_set():
            return
        if self._gate.is_read:
            await asyncio.sleep(READ_S)
            return
        log.info("no request needs the model: it is unloaded until one does")
        service = self._gate.fall_asleep(asleep)
        self._app[BOOK].clear()
        await service.engine.drain(self._app[LIMITS].grace_s)
        del service
        await self.close()
        gc.unfreeze()
        await asyncio.to_thread(gc.collect)

    async def _first_of(self, event: asyncio.Event, *, within_s: float = inf) -> None:
        """Wait for an event, or the daemon's end, or so long."""
        waits = [asyncio.create_task(each.wait()) for each in (event, self._stopping)]
        timeout_s = None if within_s == inf else within_s
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()

    async def _wake(self) -> None:
        if self._stopping.is_set():
            return
        try:
            opened = await self._open_service()
            service = await opened.__aenter__()
        except Exception as error:
            message = error.message if isinstance(error, TowerdError) else repr(error)
            log.error("the model could not be loaded again: %s", message)
            self._gate.not_woken(TowerdError(NOT_WOKEN))
            return
        self._opened = opened
        await asyncio.to_thread(tune_gc)
        log.info("the model is loaded again")
        self._gate.woken(service)
