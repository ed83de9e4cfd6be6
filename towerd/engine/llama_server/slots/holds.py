"""SlotHolds: gives requests their slots, and takes these back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from towerd.engine.base import SlotView, tokens_per_second
from towerd.engine.llama_server.process.backend import LlamaServerBackend
from towerd.engine.llama_server.process.client import LOST
from towerd.engine.llama_server.process.upstream_adapters import UpstreamAdapters
from towerd.engine.llama_server.slots.launch_gate import LaunchGate
from towerd.engine.llama_server.slots.placement import (
    Costs,
    PlacementPolicy,
    SlotChoice,
    SlotRequest,
)
from towerd.engine.llama_server.slots.placer import PlacedPrompt, Placer, StateParts
from towerd.engine.llama_server.slots.slot import Slot
from towerd.engine.llama_server.slots.slot_table import SlotTable
from towerd.engine.llama_server.slots.slot_upkeep import SlotUpkeep
from towerd.engine.moving.rotation import Rotation
from towerd.engine.moving.runs import MovedRuns
from towerd.errors import TowerdError, Unavailable
from towerd.store.sessions.deletions import DeletionWatch
from towerd.tiers.manager import Tiers
from towerd.tokens import Ids

log = logging.getLogger(__name__)

LAUNCH_POLL_S = 0.05
SLOTS_S_MAX = 1.0
"""How long llama-server may take to say what its slots do: it answers between two batches."""
MISSES_MAX = 5
"""After this many restores in a row that were not used, no more are tried."""


class SlotHold:
    """One request's hold on one slot, which has as much of its prompt as is available. Use it as a
    context manager, which gives the slot back on every exit."""

    def __init__(
        self,
        holds: SlotHolds,
        slot: Slot,
        request: SlotRequest,
        placed: PlacedPrompt,
        session: str | None,
        since: DeletionWatch,
    ) -> None:
        """since: what was deleted since its request began"""
        self.slot = slot.id
        """The slot to pin the request to (`id_slot`)."""
        self.reuse = placed.reuse
        """Where the prompt's tokens come from."""
        self.session = session
        """The session that its client names."""
        self.ids = request.ids
        self.scope = request.scope
        self.t_began = time.monotonic()
        """When its request was parsed."""
        self.t_first: float | None = None
        """When its reply began; None before, or if that does not show until its end."""
        self._holds = holds
        self._slot = slot
        self._placed = placed
        self._since = since
        self._epoch = holds.placer.epoch
        self._is_exact = True
        """False: the slot's rows are not what evaluating its tokens gives."""
        self._is_placing = True
        self._is_awaited = True
        self._is_open = True
        self._is_released = False

    @property
    def evaluated(self) -> tuple[int, float]:
        """How many of the prompt's tokens were evaluated before the request runs, and in how many
        milliseconds."""
        return self._placed.n_evaluated, self._placed.evaluated_ms

    @property
    def is_stale(self) -> bool:
        """Whether llama-server was restarted since, so that the slot is empty."""
        return self._epoch != self._holds.placer.epoch

    def launched(self) -> None:
        """Called when the request runs in its slot: others may be placed from now on."""
        if self._is_placing:
            self._is_placing = False
            self._holds.gate.end_placing()

    def answering(self) -> None:
        """Called when the reply begins: work that would have delayed it may be done now."""
        if self._is_awaited:
            self._is_awaited = False
            self.t_first = time.monotonic()
            self._holds.upkeep.n_awaited -= 1

    def observe(self, cache_n: int, prompt_ms: float) -> None:
        """Compare what llama-server says with what was prepared for it: how many prompt tokens it
        reused, and how long the others took (if they were evaluated at once)."""
        if self.ids is None:
            return
        placed = self._placed
        if not placed.n_evaluated:
            self._holds.placer.policy.costs.observe_prefill(len(self.ids) - cache_n, prompt_ms)
        if placed.n_cached_max is not None and cache_n > placed.n_cached_max:
            # It moved rows from elsewhere in the slot (--cache-reuse), which is not exact.
            self._is_exact = False
        if placed.n_cached is not None and not self.is_stale:
            self._holds.compare(cache_n, placed.n_cached, restored=placed.is_restored)

    def replied(self, reply: Ids, *, n_uncertain: int = 0, hidden: bool = False) -> None:
        """Note what the slot holds after this reply: all but its last token, which llama-server
        never evaluated. n_uncertain: about how many tokens follow whose ids are not certain; hidden:
        whether it may hold more than that."""
        if self.ids is None or self.is_stale:
            return
        self._is_open = False
        self._slot.since = self._since
        tokens = np.concatenate([self.ids, reply[:-1]])
        if not self._is_exact or len(tokens) + n_uncertain >= self._holds.n_ctx:
            # Moved rows or a context shift, which must never be stored.
            self._slot.hold_unknown(self.scope)
        else:
            self._slot.hold(tokens, self.scope, n_uncertain=n_uncertain, hidden=hidden)

    async def __aenter__(self) -> SlotHold:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the slot back. Unless it has `replied`, only what was in place before counts."""
        self.launched()
        self.answering()
        if self._is_released:
            return
        self._is_released = True
        if self._is_open and not self.is_stale:
            self._slot.since = self._since
            if self.ids is None:
                self._slot.hold_unknown(self.scope)
            else:
                self._slot.hold_first(self.ids[: self._placed.n_cached or 0], self.scope)
        self._holds.give_back(self, self._slot)


class SlotHolds:
    """The slots of one llama-server, for the requests that run in them. On the event loop."""

    def __init__(
        self,
        backend: LlamaServerBackend,
        tiers: Tiers,
        adapters: UpstreamAdapters,
        runs: MovedRuns,
        rotation: Rotation,
        notes: list[str],
        *,
        queue_max: int,
        states: StateParts | None = None,
    ) -> None:
        """runs: finds rows that are kept behind other text. rotation: says whether there may be any here;
        a store may have those of another start. notes: the engine's, to which one may be added.
        queue_max: requests that may wait for a slot. states: see Placer."""
        found, spec = backend.probe, backend.probe.spec
        policy = PlacementPolicy(
            Costs(),
            window=spec.window if spec is not None and spec.has_window else 0,
            extends_only=found.extends_only,
            can_store=found.can_compose,
        )
        self.tiers = tiers
        self.runs = runs
        self._rotation = rotation
        self.n_ctx = found.n_ctx
        self.table = SlotTable(
            policy,
            found.n_slots,
            queue_max=queue_max,
            verify=lambda: self.upkeep.verify_soon(),
            cells=found.cells,
        )
        self._workers = ThreadPoolExecutor(4, "towerd-slots")
        self.placer = Placer(backend, tiers, self.table, adapters, runs, self._workers, states)
        self.upkeep = SlotUpkeep(self.placer, self.table, backend.upstream)
        self.gate = LaunchGate()
        self.all_ended = asyncio.Event()
        """Set while no slot is held, or prepared for a request."""
        self.all_ended.set()
        self._open: set[SlotHold] = set()
        self._n_placing = 0
        self.upstream = backend.upstream
        self._notes = notes
        self._n_missed = 0
        self._is_distrusted = False

    # ---- requests whose slot towerd chooses -------------------------------------------------

    async def hold(
        self,
        ids: Ids,
        scope: str,
        session: str | None = None,
        *,
        n_predict: int = -1,
        cache_prompt: bool = True,
        takes_moved: bool = True,
        run_tokens_min: int = 0,
    ) -> SlotHold:
        """Wait for a slot for this prompt, and bring as much of the prompt into it as is worth it.

        n_predict: maximum number of tokens of the reply; negative: no limit. cache_prompt=False: the
        client wants nothing reused. takes_moved, run_tokens_min: see SlotRequest. Raises Unavailable
        when too many wait, or llama-server ended meanwhile."""
        ids = np.ascontiguousarray(ids, np.int32)
        since = self.tiers.store.deletions.watch()
        with self.placer.path_of(ids, scope) as path:
            request = SlotRequest(
                ids,
                scope,
                cache_prompt=cache_prompt,
                path=path,
                n_predict=n_predict,
                takes_moved=takes_moved and not self._rotation.why_not,
                run_tokens_min=run_tokens_min,
                since=since,
            )
            if not self.placer.is_continuation(request):
                await self.placer.look_up(request)
            return await self._hold(request, session, since)

    async def hold_opaque(self, scope: str) -> SlotHold:
        """A slot for a prompt whose tokens are not known (pictures, sounds): the one that such a
        prompt of this scope had last, if it is free. It is never stored."""
        since = self.tiers.store.deletions.watch()
        return await self._hold(SlotRequest(None, scope), None, since)

    async def _hold(
        self, request: SlotRequest, session: str | None, since: DeletionWatch
    ) -> SlotHold:
        epoch = self.placer.epoch
        choice = await self.table.acquire(request)
        try:
            self._check(epoch)
            await self.gate.begin_placing()
        except BaseException:
            self.table.undo(choice)
            raise
        self._n_placing += 1
        self.all_ended.clear()
        try:
            if self.placer.is_in_place(request, choice):
                placed = await self._place(request, choice, epoch)
            else:
                placing = asyncio.create_task(self._place(request, choice, epoch))
                try:
                    placed = await asyncio.shield(placing)
                except asyncio.CancelledError:
                    request.left.set()
                    self.upkeep.spawn(self._put_back(choice.slot, placing, since))
                    raise
            hold = SlotHold(self, choice.slot, request, placed, session, since)
            self._open.add(hold)
        finally:
            self._n_placing -= 1
            self._note_end()
        self.upkeep.n_awaited += 1
        return hold

    def _note_end(self) -> None:
        if not self._open and not self._n_placing:
            self.all_ended.set()

    async def _place(self, request: SlotRequest, choice: SlotChoice, epoch: int) -> PlacedPrompt:
        slot = choice.slot
        self.upkeep.n_preparing += 1
        try:
            placed = await self.placer.place(request, choice)
            self._check(epoch)
        except BaseException:
            self.gate.end_placing()
            slot.hold_unknown("")
            self.table.free(slot)
            raise
        finally:
            self.upkeep.n_preparing -= 1
        return placed

    def _check(self, epoch: int) -> None:
        if epoch != self.placer.epoch:
            raise Unavailable(LOST)

    async def _put_back(
        self, slot: Slot, placing: asyncio.Task[PlacedPrompt], since: DeletionWatch
    ) -> None:
        """Free a slot whose client left while it was prepared. llama-server finishes what it was
        told, so the preparation is awaited, and what was saved or restored is not lost."""
        await asyncio.wait((placing,))
        if placing.exception() is None:
            slot.since = since
            self.gate.end_placing()
            self.table.free(slot)
            self.upkeep.capture_later(slot)

    def give_back(self, hold: SlotHold, slot: Slot) -> None:
        """Free the slot of a hold that ended."""
        self._open.discard(hold)
        if self._is_distrusted:
            slot.hold_unknown("")
        self.table.free(slot)
        self.upkeep.capture_later(slot)
        self._note_end()

    # ---- requests that llama-server places itself -------------------------------------------

    @asynccontextmanager
    async def unpinned(self) -> AsyncIterator[Callable[[], None]]:
        """Wraps a request that llama-server places itself. It starts when no other is between its
        restore and its launch, and delays others until it is launched, which is told by the function
        that this gives, or ends; then free slots are asked what they hold."""
        self.upkeep.spawn(self._find_launched())
        await self.gate.begin_unpinned()
        is_launched = False

        def launched() -> None:
            nonlocal is_launched
            self.upkeep.doubt()
            if not is_launched:
                is_launched = True
                self.gate.end_unpinned()

        try:
            yield launched
        finally:
            launched()

    async def _find_launched(self) -> None:
        """While an unpinned request waits, find requests that were launched: their slots run,
        although their first bytes have not come (a reply that is not streamed comes at its end)."""
        await asyncio.sleep(LAUNCH_POLL_S)
        while self.gate.is_awaited:
            try:
                running = {v["id"] for v in await self.upstream.slots() if v["is_processing"]}
            except TowerdError:
                return
            for hold in list(self._open):
                if hold.slot in running:
                    hold.launched()
            await asyncio.sleep(LAUNCH_POLL_S)

    # ---- what slots are believed to hold ----------------------------------------------------

    def compare(self, n: int, expected: int, *, restored: bool) -> None:
        """Called when a reply says that `n` tokens were reused. `restored`: those `expected` came
        from a restore for this request."""
        if n >= expected:
            self._n_missed = 0 if restored else self._n_missed
        elif restored:
            self._restore_missed(expected, n)
        else:
            self.placer.counters.live_missed += 1
            self.upkeep.doubt()  # maybe it was restarted without towerd's knowledge

    def _restore_missed(self, expected: int, n: int) -> None:
        self.placer.counters.restores_missed += 1
        self._n_missed += 1
        log.warning("a restored slot was not used", extra={"restored": expected, "used": n})
        if self._n_missed < MISSES_MAX or not self.placer.can_compose:
            return
        self.placer.stop_composing()
        note = (
            f"Nothing is restored any more: {self._n_missed} restored slots in a row were not used, "
            "so this llama-server computes everything anyway."
        )
        self._notes.append(note)
        log.error(note)

    def forget(self, reason: str) -> None:
        """llama-server ended, or does not answer: every slot is empty, and what waits fails."""
        self.placer.epoch += 1
        for slot in self.table.slots:
            slot.forget()
        self.table.fail_waiting(Unavailable(f"llama-server {reason}; try again in a moment."))

    def distrust(self) -> None:
        """Use no slot's contents from now on, and store nothing: the weights are others."""
        self._is_distrusted = True
        self.placer.stop_composing()
        for slot in self.table.slots:
            if not slot.busy:
                slot.hold_unknown("")

    def frozen(self, prefixes: Collection[tuple[str, bytes]]) -> None:
        """The store dropped the segments with these (scope, ids): slots that hold them are not
        saved, because that would bring them back."""
        for slot in self.table.slots:
            data = slot.tokens.tobytes()
            if any(slot.scope == scope and data.startswith(ids) for scope, ids in prefixes):
                slot.be_stored()

    # ---- seen from outside ------------------------------------------------------------------

    async def running(self) -> list[SlotView]:
        """The slots that are held, and how far each request is. Of a llama-server that does not say
        what they do, only what towerd knows itself."""
        holds = {hold.slot: hold for hold in self._open}
        said: dict[int, Mapping[str, Any]] = {}
        if holds:
            try:
                found = await asyncio.wait_for(self.upstream.slots(), SLOTS_S_MAX)
                said = {each["id"]: each for each in found if each["is_processing"]}
            except (TowerdError, TimeoutError):
                pass
        return [_view(hold, said.get(slot, {}), self.n_ctx) for slot, hold in holds.items()]

    async def close(self, *, save: bool) -> None:
        """Wait for the background work; save: also save idle slots."""
        await self.upkeep.close(save=save)
        await asyncio.to_thread(self._workers.shutdown)


def _view(hold: SlotHold, said: Mapping[str, Any], n_ctx: int) -> SlotView:
    """said: the slot as llama-server shows it; empty while the request is not in it."""
    n_prompt = 0 if hold.ids is None else len(hold.ids)
    cached = hold.reuse.live + hold.reuse.hot + hold.reuse.warm
    n_decoded = said["next_token"][0]["n_decoded"] if said else 0
    first = hold.t_first
    return SlotView(
        id=hold.slot,
        n_ctx=n_ctx,
        is_processing=True,
        session=hold.session,
        n_tokens=said.get("n_prompt_tokens", n_prompt),
        n_decoded=n_decoded,
        request=None,
        scope=hold.scope,
        n_prompt_processed=said.get("n_prompt_tokens_processed", 0),
        n_prompt_cached=said.get("n_prompt_tokens_cache", cached),
        ttft_s=None if first is None else first - hold.t_began,
        tokens_per_second=(
            None if first is None else tokens_per_second(n_decoded, time.monotonic() - first)
        ),
    )
