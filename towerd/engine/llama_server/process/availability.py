"""Availability: whether llama-server can take requests now."""

from __future__ import annotations

import asyncio

from towerd.engine.base import CLOSING
from towerd.engine.llama_server.process.backend import LlamaServerBackend
from towerd.engine.llama_server.process.upstream_weights import UpstreamWeights
from towerd.engine.llama_server.slots.placer import Placer
from towerd.engine.llama_server.slots.slot_upkeep import SlotUpkeep
from towerd.errors import TowerdError, Unavailable

POLL_S = 0.5


class Availability:
    """Used on the event loop. A llama-server that towerd started is supervised by its process; for
    an attached one that no longer answers this waits."""

    def __init__(
        self,
        backend: LlamaServerBackend,
        placer: Placer,
        upkeep: SlotUpkeep,
        weights: UpstreamWeights,
    ) -> None:
        self.is_draining = False
        """Whether towerd shuts down."""
        self._process = backend.process
        self._upstream = backend.upstream
        self._placer = placer
        self._upkeep = upkeep
        self._weights = weights
        self._is_reachable = True
        if self._process is not None:
            self._process.on_exit = self._ended
            self._process.on_start = weights.reloaded

    @property
    def is_running(self) -> bool:
        """Whether llama-server can take requests now."""
        return self._is_reachable and (self._process is None or self._process.is_running)

    def check(self) -> None:
        """Raises Unavailable unless a request can be sent."""
        if self.is_draining:
            raise Unavailable(CLOSING)
        if not self.is_running:
            raise Unavailable("llama-server is being started again; try again in a moment.")

    def notice(self, error: TowerdError) -> None:
        """Called when a request to llama-server failed."""
        is_ours = self._process is not None
        if is_ours or not self._is_reachable or not isinstance(error, Unavailable):
            return
        self._is_reachable = False
        self._ended()
        self._upkeep.spawn(self._wait_reachable())

    def drain(self) -> None:
        """Take no more requests, and fail those that wait for a slot."""
        self.is_draining = True
        self._placer.table.fail_waiting(Unavailable(CLOSING))

    def _ended(self) -> None:
        """Mark every slot empty, and fail the waiting requests."""
        process = self._process
        reason = process.exit_reason if process is not None else "does not answer any more"
        self._placer.epoch += 1
        table = self._placer.table
        for slot in table.slots:
            slot.forget()
        table.fail_waiting(Unavailable(f"llama-server {reason}; try again in a moment."))

    async def _wait_reachable(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if self.is_draining or await self._upstream.is_healthy():
                break
        for slot in self._placer.table.slots:
            slot.hold_unknown("")  # maybe only the connection was broken
        await self._weights.reloaded()
        self._is_reachable = True
