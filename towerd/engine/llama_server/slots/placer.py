"""Placer: carries out the policy's choices: looks up, captures, restores, erases, makes room.

Between two requests only the placer changes what the slots hold, and it records that.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from towerd.engine.base import Reuse
from towerd.engine.checkpoint_positions import CheckpointPositions
from towerd.engine.llama_server.process.backend import LlamaServerBackend
from towerd.engine.llama_server.process.upstream_adapters import UpstreamAdapters
from towerd.engine.llama_server.process.upstream_client import SlotAction, UpstreamGone
from towerd.engine.llama_server.slots.placement import SlotChoice, SlotRequest
from towerd.engine.llama_server.slots.slot import Slot
from towerd.engine.llama_server.slots.slot_checkpoints import Ahead, SlotCheckpoints
from towerd.engine.llama_server.slots.slot_counters import SlotCounters
from towerd.engine.llama_server.slots.slot_moves import Moved, SlotMover
from towerd.engine.llama_server.slots.slot_rows import Restored, SlotRows
from towerd.engine.llama_server.slots.slot_table import SlotTable
from towerd.engine.moving.runs import MovedRuns
from towerd.errors import TowerdError
from towerd.slots.errors import StateError
from towerd.slots.image import SlotImage
from towerd.slots.kind import WHOLE
from towerd.store import Handle
from towerd.store.tree.scope import adapters_of
from towerd.tiers.checkpoint_tier import CheckpointTier
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import RestorePlan
from towerd.tokens import Ids, Provenance, count_approximate

log = logging.getLogger(__name__)

_SHORT_TOKENS = 256
"""A prompt that adds no more than this to a live slot is not looked up in the store first."""

_MOVE_FAILURES_MAX = 3
"""After this many failures in a row no rows are moved until the next start."""


@dataclass(frozen=True, slots=True)
class StateParts:
    """What a memory that cannot be restored at any token needs."""

    tier: CheckpointTier | None
    """Keeps its states; None for one whose rows are enough, where a whole window of them is stored."""
    positions: CheckpointPositions


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt in its slot, and what its reply should report."""

    reuse: Reuse
    """Where the prompt's tokens come from."""
    n_cached: int | None = None
    """How many tokens the reply should report as cached; None: that cannot be predicted."""
    n_cached_max: int | None = None
    """The most that it can report; None when the slot may hold more than is known."""
    is_restored: bool = False
    """Whether the tokens in place come from a restore for this request."""
    n_evaluated: int = 0
    """How many of the prompt's tokens were evaluated to bring the others."""
    evaluated_ms: float = 0.0
    """How long that took, with what it was for."""


class Placer:
    """Prepares slots."""

    def __init__(
        self,
        backend: LlamaServerBackend,
        tiers: Tiers,
        table: SlotTable,
        adapters: UpstreamAdapters,
        runs: MovedRuns,
        workers: ThreadPoolExecutor,
        states: StateParts | None,
    ) -> None:
        """states: needed for a memory with a state or with sliding windows"""
        found = backend.probe
        self.counters = SlotCounters()
        self.can_compose = found.can_compose
        self.epoch = 0
        """The number of restarts of llama-server; what a request of an older epoch held is gone."""
        self.policy = table.policy
        self._table = table
        self._keeps_idle = found.keeps_idle_slots
        self._upstream = backend.upstream
        self._adapters = adapters
        self._tiers = tiers
        self._workers = workers
        self._runs = runs
        self._n_move_failures = 0
        """In a row."""
        self._rows: SlotRows | None = None
        self._mover: SlotMover | None = None
        self._checkpoint_tier: CheckpointTier | None = None
        self._checkpoints: SlotCheckpoints | None = None
        if found.spec is None:
            return
        counters, upstream, saving = self.counters, backend.upstream, (self.capture, self.erase)
        self._checkpoint_tier = tier = None if states is None else states.tier
        self._rows = rows = SlotRows(backend, tiers, found.spec, tier, workers)
        if states is None:
            self._mover = SlotMover(
                rows, runs, table, counters, upstream, adapters, workers, *saving
            )
        elif found.spec.kind is not WHOLE:  # as large as the conversation: its end is enough
            self._checkpoints = SlotCheckpoints(
                states.positions, lambda: self.policy.costs, upstream, adapters, workers, *saving
            )

    def stop_composing(self) -> None:
        """Save and restore nothing from now on."""
        self.can_compose = self.policy.can_store = False

    # ---- before a slot is chosen ------------------------------------------------------------

    def is_continuation(self, request: SlotRequest) -> bool:
        """Whether a free slot holds all but little of the prompt, and nothing after it."""
        assert request.ids is not None
        for slot in self._table.slots:
            if slot.busy or not slot.known or not slot.sure or slot.scope != request.scope:
                continue
            if slot.n_unmoved < slot.n:
                continue  # there may be better rows meanwhile
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
            return RestorePlan()
        worst = Provenance.AFTER_MOVED if request.takes_moved else Provenance.APPROXIMATE
        look_up = partial(self._plan, request.path, worst)
        plan = await asyncio.get_running_loop().run_in_executor(self._workers, look_up)
        request.n_storable, request.n_public = plan.n, plan.n_public
        request.n_unmoved = plan.n_unmoved if plan.parts else plan.n
        return plan

    def _plan(self, path: Handle, worst: Provenance) -> RestorePlan:
        """What the store has of a path; for a kind that has a state up to the last checkpoint."""
        plan = self._tiers.plan(path, 0, worst=worst)
        if self._checkpoint_tier is None:
            return plan
        assert self._rows is not None
        end = plan.n if self._rows.spec.kind.has_rows else plan.n_match
        checkpoint = self._checkpoint_tier.deepest(path, 0, end)
        if checkpoint is None:
            return RestorePlan(n_public=plan.n_public, n_match=plan.n_match)
        return plan.up_to(checkpoint)

    def is_in_place(self, request: SlotRequest, choice: SlotChoice) -> bool:
        """Whether a choice needs nothing but the request itself."""
        if choice.restore or choice.erase or choice.capture is not None or not choice.n_reused:
            return False
        if self._mover is not None and self._mover.is_wanted(request, choice.n_reused):
            return False
        if self._advances(request, choice.n_reused):
            return False
        others = [each for each in self._table.slots if each is not choice.slot]
        n_others = sum(each.n_needed for each in others)
        return self._keeps_idle and self._table.fits(n_others, request)

    # ---- in a chosen slot -------------------------------------------------------------------

    async def place(self, request: SlotRequest, choice: SlotChoice) -> PlacedPrompt:
        """Prepare the slot for the request. Raises TowerdError."""
        slot = choice.slot
        await self.clear(choice)
        if not self._keeps_idle:
            await self._give_up_idle(slot)
        if request.ids is None:
            return PlacedPrompt(Reuse())
        if not choice.restore and choice.n_reused == 0 and request.n_storable == 0:
            # The slot that it seemed to continue in was taken meanwhile, so it was not looked up.
            await self.look_up(request)
            choice = replace(choice, restore=request.n_storable > 0)
        if choice.restore:
            restored = await self._restore(request, slot)
            if restored is not None:
                return await self._continue(request, slot, restored.n, restored)
            live, erase = self.policy.live(request, slot)
            if erase:
                await self.erase(slot)
            choice = replace(choice, n_reused=0 if erase else live)
        await self._make_room(slot, request)
        n = min(choice.n_reused, request.n - 1)
        return await self._continue(request, slot, n, None)

    def _placed(
        self,
        request: SlotRequest,
        slot: Slot,
        n: int,
        restored: Restored | None,
        moved: Moved | None,
        ahead: Ahead | None = None,
    ) -> PlacedPrompt:
        """`n` tokens of the prompt are in place, and what was `moved` or evaluated `ahead` behind them."""
        assert request.ids is not None
        n = min(n, slot.common(request.ids))  # it is empty if they could not be moved
        n_hot = 0 if restored is None else min(restored.n_hot, n)
        live = slot.provenance_of(n if moved is None else slot.n)
        reuse = Reuse(n, 0, 0, request.n - n, count_approximate(live[:n]))
        if restored is not None:
            reuse = replace(reuse, live=0, hot=n_hot, warm=n - n_hot)
        if moved is not None:
            reuse = moved.counted_in(reuse)
            n = slot.n
        if reuse.approximate:
            moves = None if moved is None else moved.moves
            reuse = replace(
                reuse, drift=self._runs.drift(moves, live, request.n, decoded=slot.decoded)
            )
        if ahead is not None:
            n = slot.n
        # With windows or recurrent layers it depends on which checkpoints the server has.
        has_new = restored is not None or moved is not None
        is_told = (
            has_new or ahead is not None or not (self.policy.window or self.policy.extends_only)
        )
        return PlacedPrompt(
            reuse,
            n if is_told and request.cache_prompt else None,
            None if slot.hidden or not slot.known else slot.common(request.ids),
            has_new,
            sum(each.n_evaluated for each in (moved, ahead) if each is not None),
            sum(each.ms for each in (moved, ahead) if each is not None),
        )

    def _advances(self, request: SlotRequest, n: int) -> bool:
        """Whether a part of the prompt behind its first `n` tokens may be evaluated by itself."""
        checkpoints = self._checkpoints if self.can_compose else None
        return checkpoints is not None and checkpoints.is_wanted(request, n)

    async def _continue(
        self, request: SlotRequest, slot: Slot, n: int, restored: Restored | None
    ) -> PlacedPrompt:
        """Do what comes before the request once the first `n` tokens of its prompt are in place."""
        if self._checkpoints is None or not self.can_compose:
            return await self._move(request, slot, n, restored)
        ahead = await self._checkpoints.advance(request, slot, n)
        return self._placed(request, slot, n, restored, None, ahead)

    async def _move(
        self, request: SlotRequest, slot: Slot, n: int, restored: Restored | None
    ) -> PlacedPrompt:
        """Bring runs that are known from elsewhere behind the first `n` tokens of the prompt. If that
        fails, the slot has what it had, or what the store has of the prompt."""
        moved: Moved | None = None
        if self._mover is not None and self.can_compose:
            try:
                moved = await self._mover.move(request, slot, n)
            except UpstreamGone:
                raise
            except (TowerdError, StateError) as error:
                self._move_failed(error)
                if not slot.known:
                    restored = await self._restore(request, slot)
                    n = 0 if restored is None else restored.n
                if not slot.known:
                    await self.erase(slot)
            if moved is not None:
                self._n_move_failures = 0
        return self._placed(request, slot, n, restored, moved)

    def _move_failed(self, error: Exception) -> None:
        """Bring no more runs if this fails again and again: what was live is lost each time."""
        self._n_move_failures += 1
        if self._n_move_failures == _MOVE_FAILURES_MAX:
            self._mover = None
            log.warning("no more rows are moved in slots", extra={"error": str(error)})

    async def clear(self, choice: SlotChoice) -> None:
        """Save what has to be saved first, and empty the slot if it has to be."""
        source = choice.capture
        if source is not None:
            try:
                await self.capture(source)
            finally:
                if source is not choice.slot:
                    self._table.free(source, used=False)
        if choice.erase and not choice.restore:
            await self.erase(choice.slot)

    async def _restore(self, request: SlotRequest, slot: Slot) -> Restored | None:
        """Restore what the store has; None if that fails. The slot's record then says what it
        holds."""
        assert request.ids is not None
        assert self._rows is not None
        plan = await self.look_up(request)
        if plan.n == 0:
            return None
        await self._adapt(slot, request)
        room = asyncio.create_task(self._make_room(slot, request))
        try:
            restored = await self._rows.restore(slot.id, request.ids, plan, room)
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
        self.counters.restored(restored)
        self.policy.costs.observe_restore(restored.n, restored.ms)
        tokens = request.ids[: restored.n]
        kept = restored.window_from, restored.provenance, restored.decoded
        slot.hold_restored(tokens, request.scope, *kept)
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

    async def erase(self, slot: Slot) -> None:
        """Empty a slot that the caller has marked busy."""
        await self._upstream.erase(slot.id)
        self.counters.erases += 1
        slot.forget()

    async def _make_room(self, slot: Slot, request: SlotRequest) -> None:
        """If all slots share the cells, empty idle ones until the request fits: with a full cache
        llama-server would empty them itself, in its own order."""
        others = [each for each in self._table.slots if each is not slot]
        while not self._table.fits(sum(each.n_needed for each in others), request):
            idle = [each for each in others if each.n and not each.busy]
            if idle:
                await self._empty(min(idle, key=lambda each: each.last_used))
            elif any(each.busy and not each.n_promised for each in others):
                await self._table.freed()  # it is only saved or emptied
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
            self._table.free(victim, used=False)

    async def _give_up_idle(self, slot: Slot) -> None:
        """If llama-server clears idle slots when another one runs, save what they hold first."""
        for other in self._table.slots:
            if other is slot or other.busy or (other.known and not other.n):
                continue
            other.busy, other.holder = True, ""
            try:
                if self.policy.worth_saving(other, 0):
                    await self.capture(other)
                other.forget()
            finally:
                self._table.free(other, used=False)

    # ---- out of a slot ----------------------------------------------------------------------

    async def capture(self, slot: Slot) -> None:
        """Save a slot that the caller has marked busy, and store what is new. A failure costs a
        prefill later; only UpstreamGone is raised."""
        assert self._rows is not None
        epoch = self.epoch
        try:
            image, n_kept, done = await self._rows.capture(slot)
        except UpstreamGone:
            raise
        except TowerdError as error:
            self.counters.saves_failed += 1
            slot.be_stored()  # not again
            log.warning("a slot could not be saved", extra={"error": error.message})
            return
        self._count_capture(image, n_kept, done)
        if epoch == self.epoch:
            slot.hold(image.tokens, slot.scope)
            slot.be_stored()

    def _count_capture(self, image: SlotImage, n_kept: int, done: SlotAction) -> None:
        self.counters.saved(done)
        self.counters.captured_tokens += n_kept
        self.policy.costs.observe_save(image.n, done.ms)
        if image.window is not None:
            self._learn_window(len(image.window.rows), image.n)

    def _learn_window(self, n_window: int, n: int) -> None:
        """Learn the window's size from a longer slot: the server saves exactly the window."""
        if n_window < n and self.policy.window != n_window:
            assert self._rows is not None
            self.policy.window = n_window
            self._rows.spec = replace(self._rows.spec, window=n_window)
