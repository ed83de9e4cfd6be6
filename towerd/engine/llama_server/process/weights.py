"""Whether a llama-server still has the weights that rows are stored for."""

from __future__ import annotations

import asyncio

from towerd.engine.llama_server.process.backend import Backend
from towerd.engine.llama_server.process.describe import Described
from towerd.engine.llama_server.slots.placement import Slot
from towerd.engine.llama_server.slots.placer import Placer
from towerd.engine.weights_check import WeightsCheck
from towerd.store import Store

NOTE = (
    "A file of its model was changed or replaced, so nothing is stored or reused any more: start "
    "llama-server and towerd again."
)


class Weights:
    """Lives on the event loop. Once the weights are others, nothing that any slot holds is used
    again, and nothing is stored."""

    def __init__(
        self,
        backend: Backend,
        described: Described,
        store: Store,
        placer: Placer,
        notes: list[str],
    ) -> None:
        """notes: those of the engine, which one may be added to"""
        self._are_others = False
        self._store = store
        self._placer = placer
        self._notes = notes
        self._loop = asyncio.get_running_loop()
        self._check = WeightsCheck(
            described.files,
            store,
            is_busy=lambda: placer.table.n_busy > 0,
            on_change=self._changed,
            follow=True,
        )
        if backend.is_stale:
            self._forget()
        self._check.start()

    async def close(self) -> None:
        await asyncio.to_thread(self._check.close)

    async def reloaded(self) -> None:
        """llama-server was started again: see what it has read."""
        await asyncio.to_thread(self._check.look)

    def left(self, slot: Slot) -> None:
        """A request has left this slot."""
        if self._are_others:
            slot.hold_unknown("")

    def _changed(self, since: float) -> None:
        self._store.rows.distrust(since)
        self._loop.call_soon_threadsafe(self._forget)

    def _forget(self) -> None:
        if self._are_others:
            return
        self._are_others = True
        self._placer.stop_composing()
        self._notes.append(NOTE)
        for slot in self._placer.table.slots:
            if not slot.busy:
                slot.hold_unknown("")
