"""Availability: whether llama-server can take requests now."""

from __future__ import annotations

import asyncio
import logging

from towerd.engine.base import CLOSING
from towerd.engine.llama_server.process.backend import LlamaServerBackend
from towerd.engine.llama_server.process.silence import SilenceWatch
from towerd.engine.llama_server.slots.holds import SlotHolds
from towerd.engine.llama_server.upstream_weights import UpstreamWeights
from towerd.errors import TowerdError, Unavailable

POLL_S = 0.5
_STARTING = "llama-server is being started again; try again in a moment."

log = logging.getLogger(__name__)


class Availability:
    """Used on the event loop. A llama-server that towerd started is supervised by its process; for
    an attached one that no longer answers this waits. Either may be stopped, or hang: then the requests
    that wait for it end, and new ones are refused until it answers."""

    def __init__(
        self,
        backend: LlamaServerBackend,
        holds: SlotHolds,
        weights: UpstreamWeights,
    ) -> None:
        self.is_draining = False
        """Whether towerd shuts down."""
        self._process = backend.process
        self._attached = backend.command
        self._upstream = backend.upstream
        self._holds = holds
        self._weights = weights
        self._is_reachable = True
        self._silent = ""
        """Why it does not answer, as a part of a sentence; empty while it does."""
        if self._process is not None:
            self._process.on_exit = self._ended
            self._process.on_start = weights.reloaded
        self._watching = asyncio.create_task(self._watch())

    @property
    def is_running(self) -> bool:
        """Whether llama-server can take requests now."""
        is_up = self._process is None or self._process.is_running
        return self._is_reachable and is_up and not self._silent

    def check(self) -> None:
        """Raises Unavailable unless a request can be sent."""
        if self.is_draining:
            raise Unavailable(CLOSING)
        if not self.is_running:
            raise self.failure(_STARTING)

    def failure(self, otherwise: str) -> Unavailable:
        """The error of a request that cannot be answered: that llama-server is silent, or `otherwise`."""
        if self._silent:
            return Unavailable(f"llama-server {self._silent}; try again when it answers")
        return Unavailable(otherwise)

    def notice(self, error: TowerdError) -> None:
        """Called when a request to llama-server failed."""
        is_ours = self._process is not None
        if is_ours or not self._is_reachable or self._silent or not isinstance(error, Unavailable):
            return
        self._is_reachable = False
        self._ended()
        self._holds.upkeep.spawn(self._wait_reachable())

    def drain(self) -> None:
        """Take no more requests, and fail those that wait for a slot."""
        self.is_draining = True
        self._holds.table.fail_waiting(Unavailable(CLOSING))

    async def close(self) -> None:
        """Stop watching."""
        self._watching.cancel()
        await asyncio.wait((self._watching,))

    def _ended(self) -> None:
        """Mark every slot empty, and fail the waiting requests."""
        process = self._process
        reason = process.exit_reason if process is not None else "does not answer any more"
        self._holds.forget(self._silent or reason)

    async def _wait_reachable(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if self.is_draining or await self._upstream.is_healthy():
                break
        await self._found_again()
        self._is_reachable = True

    async def _found_again(self) -> None:
        for slot in self._holds.table.slots:
            slot.hold_unknown("")  # maybe only the connection was broken
        await self._weights.reloaded()

    # ---- silence --------------------------------------------------------------------------

    async def _watch(self) -> None:
        watch = SilenceWatch(self._upstream.answer, pid=self._pid, is_busy=self._is_busy)
        while True:
            self._silent = await watch.until_silent()
            log.error("llama-server %s", self._silent, extra={"pid": self._pid()})
            self._holds.forget(self._silent)
            await self._upstream.drop()
            await watch.until_answer()
            try:
                await self._found_again()
            except Exception:
                log.exception("the slots of a llama-server that answers again are not known")
            self._silent = ""
            log.warning("llama-server answers again", extra={"pid": self._pid()})

    def _pid(self) -> int | None:
        if self._process is not None:
            return self._process.pid
        return None if self._attached is None else self._attached.pid or None

    def _is_busy(self) -> bool:
        return self._upstream.n_waiting > 0 or self._holds.table.n_busy > 0
