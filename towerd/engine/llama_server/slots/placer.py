"""Placer: carries out the policy's choices: looks up, captures, restores, erases, makes room.

Between two requests only the placer changes what the slots hold, and it records that.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from towerd.engine.llama_server.process.backend import LlamaServerBackend
from towerd.engine.llama_server.process.upstream_adapters import UpstreamAdapters
from towerd.engine.llama_server.process.upstream_client import UpstreamGone
from towerd.engine.llama_server.slots.capture import Captured, Capturer
from towerd.engine.llama_server.slots.placement import (
    Costs,
    PlacementPolicy,
    SlotChoice,
    SlotRequest,
)
from towerd.engine.llama_server.slots.restore import Restored, SlotRestorer
from towerd.engine.llama_server.slots.slot import Slot
from towerd.engine.llama_server.slots.slot_counters import SlotCounters
from towerd.engine.llama_server.slots.slot_table import SlotTable
from towerd.errors import TowerdError
from towerd.store import Handle
from towerd.store.tree.scope import adapters_of
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import RestorePlan
from towerd.tokens import Ids

log = logging.getLogger(__name__)

_SHORT_TOKENS = 256
"""A prompt that adds no more than this to a live slot is not looked up in the store first."""


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt in its slot: `n` of its tokens are in place."""

    n: int
    restored: Restored | None


class Placer:
    """Prepares slots. The engine sets `table` right after construction."""

    table: SlotTable

    def __init__(
        self,
        backend: LlamaServerBackend,
        tiers: Tiers,
        workers: ThreadPoolExecutor,
        adapters: UpstreamAdapters,
    ) -> None:
        found = backend.probe
        self.counters = SlotCounters()
        self.can_compose = found.can_compose
        self.epoch = 0
        """The number of restarts of llama-server; a lease of an older epoch is void."""
        spec = found.spec
        window = spec.window if spec is not None and spec.has_window else 0
        self.policy = PlacementPolicy(
            Costs(),
            window=window,
            extends_only=found.extends_only,
            can_store=found.can_compose,
        )
        self._keeps_idle = found.keeps_idle_slots
        self._upstream = backend.upstream
        self._adapters = adapters
        self._tiers = tiers
        self._workers = workers
        self._restorer: SlotRestorer | None = None
        self._capturer: Capturer | None = None
        if spec is not None:
            parts = backend.upstream, backend.slotdir, tiers, spec, workers
            self._restorer, self._capturer = SlotRestorer(*parts), Capturer(*parts)

    def stop_composing(self) -> None:
        """Save and restore nothing from now on."""
        self.can_compose = self.policy.can_store = False

    # ---- before a slot is chosen ------------------------------------------------------------

    def is_continuation(self, request: SlotRequest) -> bool:
        """Whether a free slot holds all but little of the prompt, and nothing after it."""
        assert request.ids is not None
        for slot in self.table.slots:
            if slot.busy or not slot.known or not slot.sure or slot.scope != request.scope:
                continue
            if (
                0 < slot.n <= request.n <= slot.n + _SHORT_TOKENS
                and slot.common(request.ids) == slot.n
            ):
                return True
        return False

    def path_of(self, ids: Ids, scope: str) -> Handle:
        """The path of a prompt. The last token is left to evaluate: restored rows carry no
        logits."""
        return self._tiers.store.hold(ids[:-1], scope)

    async def look_up(self, request: SlotRequest) -> RestorePlan:
        """What the store has of the prompt, which is also noted in `request`."""
        if not self.can_compose or not request.cache_prompt or request.path is None:
            return RestorePlan.nothing()
        plan = await asyncio.get_running_loop().run_in_executor(
            self._workers, self._tiers.plan, request.path, 0
        )
        request.n_storable, request.n_public = plan.n, plan.n_public
        return plan

    def has_room(self, slot: Slot, request: SlotRequest) -> bool:
        """Whether the request can run in the slot while all others stay as they are."""
        if not self._keeps_idle:
            return False
        n_others = sum(each.n_needed for each in self.table.slots if each is not slot)
        return self.table.fits(n_others, request)

    def is_in_place(self, request: SlotRequest, choice: SlotChoice) -> bool:
        """Whether a choice needs nothing but the request itself."""
        if choice.restore or choice.erase or choice.capture is not None or not choice.n_reused:
            return False
        return self.has_room(choice.slot, request)

    # ---- in a chosen slot -------------------------------------------------------------------

    async def place(self, request: SlotRequest, choice: SlotChoice) -> PlacedPrompt:
        """Prepare the slot for the request. Raises TowerdError."""
        slot = choice.slot
        await self.clear(choice)
        if not self._keeps_idle:
            await self._give_up_idle(slot)
        if request.ids is None:
            return PlacedPrompt(0, None)
        if not choice.restore and choice.n_reused == 0 and request.n_storable == 0:
            # The slot that it seemed to continue in was taken meanwhile, so it was not looked up.
            await self.look_up(request)
            choice = replace(choice, restore=request.n_storable > 0)
        if choice.restore:
            restored = await self._restore(request, slot)
            if restored is not None:
                return PlacedPrompt(restored.n, restored)
            live, erase = self.policy.live(request, slot)
            if erase:
                await self.erase(slot)
            choice = replace(choice, n_reused=0 if erase else live)
        await self._make_room(slot, request)
        return PlacedPrompt(min(choice.n_reused, request.n - 1), None)

    async def clear(self, choice: SlotChoice) -> None:
        """Save what has to be saved first, and empty the slot if it has to be."""
        source = choice.capture
        if source is not None:
            try:
                await self.capture(source)
            finally:
                if source is not choice.slot:
                    self.table.free(source, used=False)
        if choice.erase and not choice.restore:
            await self.erase(choice.slot)

    async def _restore(self, request: SlotRequest, slot: Slot) -> Restored | None:
        """Restore what the store has; None if that fails. The slot's record then says what it
        holds."""
        assert request.ids is not None
        assert self._restorer is not None
        plan = await self.look_up(request)
        if plan.n == 0:
            return None
        await self._adapt(slot, request)
        room = asyncio.create_task(self._make_room(slot, request))
        try:
            restored = await self._restorer.restore(slot.id, request.ids, plan, room)
        except UpstreamGone:
            raise
        except TowerdError as error:
            if room.done():
                room.result()  # without room the request cannot run
            self.counters.restores_failed += 1
            log.warning("a slot could not be restored", extra={"error": error.message})
            slot.hold_unknown("")  # maybe llama-server did not begin
            return None
        if restored is None:
            return None
        self._count_restore(restored)
        tokens = request.ids[: restored.n]
        slot.hold_restored(tokens, request.scope, restored.window_from, restored.provenance)
        return restored

    async def _adapt(self, slot: Slot, request: SlotRequest) -> None:
        """Have the slot apply the request's adapters: llama-server empties a slot whose next request
        names others."""
        assert request.ids is not None
        wanted = adapters_of(request.scope)
        if slot.adapters != wanted:
            await self._upstream.adapt(
                slot.id, int(request.ids[0]), self._adapters.entries(request.scope)
            )
            slot.adapters = wanted

    def _count_restore(self, restored: Restored) -> None:
        counters = self.counters
        counters.restores += 1
        counters.restore_bytes += restored.n_bytes
        counters.restore_ms += restored.ms
        counters.blocked_ms += restored.restore_ms
        counters.composed_tokens += restored.n
        self.policy.costs.observe_restore(restored.n, restored.ms)

    async def erase(self, slot: Slot) -> None:
        """Empty a slot that the caller has marked busy."""
        await self._upstream.erase(slot.id)
        self.counters.erases += 1
        slot.forget()

    async def _make_room(self, slot: Slot, request: SlotRequest) -> None:
        """If all slots share the cells, empty idle ones until the request fits: with a full cache
        llama-server would empty them itself, in its own order."""
        others = [each for each in self.table.slots if each is not slot]
        while not self.table.fits(sum(each.n_needed for each in others), request):
            idle = [each for each in others if each.n and not each.busy]
            if idle:
                await self._empty(min(idle, key=lambda each: each.last_used))
            elif any(each.busy and not each.n_promised for each in others):
                await self.table.freed()  # it is only saved or emptied
            else:
                return

    async def _empty(self, victim: Slot) -> None:
        """Empty an idle slot, after saving it if that is worth it."""
        victim.busy, victim.holder = True, ""
        try:
            if self.policy.worth_saving(victim, 0):
                await self.capture(victim)
            await self.erase(victim)
        finally:
            self.table.free(victim, used=False)

    async def _give_up_idle(self, slot: Slot) -> None:
        """If llama-server clears idle slots when another one runs, save what they hold first."""
        for other in self.table.slots:
            if other is slot or other.busy or (other.known and not other.n):
                continue
            other.busy, other.holder = True, ""
            try:
                if self.policy.worth_saving(other, 0):
                    await self.capture(other)
                other.forget()
            finally:
                self.table.free(other, used=False)

    # ---- out of a slot ----------------------------------------------------------------------

    async def capture(self, slot: Slot) -> None:
        """Save a slot that the caller has marked busy, and store what is new. A failure costs a
        prefill later; only UpstreamGone is raised."""
        assert self._capturer is not None
        epoch = self.epoch
        try:
            captured = await self._capturer.capture(slot)
        except UpstreamGone:
            raise
        except TowerdError as error:
            self.counters.saves_failed += 1
            slot.n_stored = slot.n  # not again
            log.warning("a slot could not be saved", extra={"error": error.message})
            return
        self._count_capture(captured)
        if epoch == self.epoch:
            slot.hold(captured.image.tokens, slot.scope)
            slot.n_stored = slot.n

    def _count_capture(self, captured: Captured) -> None:
        self.counters.saves += 1
        self.counters.save_bytes += captured.n_bytes
        self.counters.blocked_ms += captured.save_ms
        self.counters.captured_tokens += captured.n_kept
        image = captured.image
        self.policy.costs.observe_save(image.n, captured.save_ms)
        if image.window is not None:
            self._learn_window(len(image.window.rows), image.n)

    def _learn_window(self, n_window: int, n: int) -> None:
        """Learn the window's size from a longer slot: the server saves exactly the window."""
        if n_window >= n or self.policy.window == n_window:
            return
        self.policy.window = n_window
        assert self._capturer is not None
        assert self._restorer is not None
        spec = replace(self._capturer.spec, window=n_window)
        self._capturer.spec = self._restorer.spec = spec
