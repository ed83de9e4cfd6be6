"""SlotCheckpoints: saves slots within a prompt, for models that cannot be restored at any token.

llama-server saves a slot only where it ends: the state there, and the rows of the last window. So the prompt is evaluated up to a position at which a later
one is likely to resume, the slot is saved, and so on; the request itself evaluates what is left. A save
writes the whole slot, so a position is passed over where evaluating its tokens again would cost less.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from towerd.engine.checkpoint_positions import CheckpointPositions
from towerd.engine.llama_server.process.upstream_adapters import UpstreamAdapters
from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.engine.llama_server.slots.placement import Costs, SlotRequest, unless_left
from towerd.engine.llama_server.slots.slot import Slot
from towerd.store.tree.scope import adapters_of
from towerd.tokens import computed_after

TOKENS_MIN = 64
"""A prompt that adds fewer tokens is evaluated in one piece."""
_WORTH = 2.0
"""How often the tokens before a checkpoint must outweigh the save that keeps them."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What of a prompt was evaluated before its request."""

    n_evaluated: int
    ms: float


class SlotCheckpoints:
    """The slots of one llama-server. On the event loop."""

    def __init__(
        self,
        positions: CheckpointPositions,
        costs: Callable[[], Costs],
        upstream: UpstreamClient,
        adapters: UpstreamAdapters,
        workers: ThreadPoolExecutor,
        capture: Callable[[Slot], Coroutine[Any, Any, None]],
        erase: Callable[[Slot], Coroutine[Any, Any, None]],
    ) -> None:
        """capture, erase: save and empty a slot that is marked busy"""
        self._positions = positions
        self._costs = costs
        self._upstream = upstream
        self._adapters = adapters
        self._workers = workers
        self._capture = capture
        self._erase = erase
        self._choosing = asyncio.Lock()

    def is_wanted(self, request: SlotRequest, n: int) -> bool:
        """Whether checkpoints may be taken of a prompt of which the slot holds `n` tokens."""
        costs, n_new = self._costs(), request.n - n
        is_long = request.cache_prompt and n_new >= TOKENS_MIN
        return is_long and costs.prefill(n_new) > _WORTH * costs.save(n)

    async def advance(self, request: SlotRequest, slot: Slot, n: int) -> Ahead | None:
        """Evaluate the prompt, of which the slot holds `n` tokens, up to its last checkpoint, and take
        all of them; None if there are none. The slot's record says what it holds afterwards, and that it
        is unknown if this raises (as UpstreamClient does)."""
        if not self.is_wanted(request, n):
            return None
        assert request.ids is not None
        async with self._choosing:
            chosen = await self._on_worker(self._choose, request, n)
        began, n_before = time.perf_counter(), n
        for position in self._worth(chosen, n):
            if request.left.is_set():
                break
            live, n_stored = slot.provenance_of(n), min(slot.n_stored, n)
            slot.hold_unknown(request.scope)
            slot.adapters = adapters_of(request.scope)
            if not await self._evaluate(request, slot, position):
                await self._erase(slot)
                return None
            evaluated = np.full(position - n, computed_after(live), np.uint8)
            tokens, provenance = request.ids[:position], np.concatenate([live, evaluated])
            slot.hold_restored(tokens, request.scope, 0, provenance, slot.decoded)
            slot.n_stored, n, slot.since = n_stored, position, request.since
            await self._capture(slot)
        if n == n_before:
            return None
        return Ahead(n - n_before, (time.perf_counter() - began) * 1e3)

    def _choose(self, request: SlotRequest, n: int) -> tuple[int, ...]:
        """Where checkpoints are likely to be of use behind token `n`; on a worker."""
        assert request.ids is not None
        assert request.path is not None
        n_match = request.path.match().n
        if n_match < request.n - 1:
            self._positions.learn(request.path, request.ids, n_match)
        return self._positions.of(request.ids, request.scope, n, {n_match})

    def _worth(self, chosen: Iterable[int], n: int) -> list[int]:
        """Those that are worth their saves."""
        costs, kept = self._costs(), []
        for position in chosen:
            if costs.prefill(position - n) > _WORTH * costs.save(position):
                kept.append(position)
                n = position
        return kept

    async def _evaluate(self, request: SlotRequest, slot: Slot, n: int) -> bool:
        """Bring the slot to hold the first `n` tokens of the prompt; False if its client left
        meanwhile, so that llama-server may have stopped anywhere."""
        assert request.ids is not None
        lora, began = self._adapters.entries(request.scope), time.perf_counter()
        asked = self._upstream.evaluate(request.ids[:n], slot.id, lora)
        n_cached = await unless_left(request, asked)
        if n_cached is None:
            return False
        self._costs().observe_prefill(n - n_cached, (time.perf_counter() - began) * 1e3)
        return True

    async def _on_worker(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *args)
