"""UpstreamWeights: watches whether llama-server still has the weights of the stored rows."""

from __future__ import annotations

import asyncio

from towerd.engine.llama_server.process.backend import LlamaServerBackend
from towerd.engine.llama_server.process.description import ModelDescription
from towerd.engine.llama_server.slots.holds import SlotHolds
from towerd.model.weights_check import WeightsCheck
from towerd.store import Store
from towerd.tiers.checkpoint_tier import CheckpointTier

NOTE = (
    "A file of its model was changed or replaced, so nothing is stored or reused any more: start "
    "llama-server and towerd again."
)


class UpstreamWeights:
    """Used on the event loop. Once the weights have changed, no slot's contents are used again, and
    nothing is stored."""

    def __init__(
        self,
        backend: LlamaServerBackend,
        described: ModelDescription,
        store: Store,
        holds: SlotHolds,
        checkpoint_tier: CheckpointTier | None,
        notes: list[str],
    ) -> None:
        """notes: the engine's, to which one may be added"""
        self._are_others = False
        self._store = store
        self._holds = holds
        self._checkpoint_tier = checkpoint_tier
        self._notes = notes
        self._loop = asyncio.get_running_loop()
        self._check = WeightsCheck(
            described.files,
            store,
            is_busy=lambda: holds.table.n_busy > 0,
            on_change=self._changed,
            follow=True,
        )
        if backend.is_stale:
            self._forget()
        self._check.start()

    async def close(self) -> None:
        await asyncio.to_thread(self._check.close)

    async def reloaded(self) -> None:
        """Check the files again after llama-server was restarted."""
        await asyncio.to_thread(self._check.look)

    def _changed(self, since: float) -> None:
        self._store.rows.distrust(since)
        if self._checkpoint_tier is not None:
            self._checkpoint_tier.distrust(since)
        self._loop.call_soon_threadsafe(self._forget)

    def _forget(self) -> None:
        if not self._are_others:
            self._are_others = True
            self._holds.distrust()
            self._notes.append(NOTE)
