"""Placement: decides which conversation is in which slot, by what each slot is believed to hold.

A decision compares milliseconds: tokens to prefill, bytes to restore, bytes to save so that nothing
valuable is lost, and the cost of restoring the conversation that has to leave. Nothing here does
I/O or reads a clock, so that every decision can be replayed.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from towerd.engine.live_index import LiveIndex
from towerd.engine.llama_server.slots.slot import Slot
from towerd.store import Handle
from towerd.store.sessions.deletions import DeletionWatch
from towerd.store.tree.scope import adapters_of
from towerd.tokens import Ids

T = TypeVar("T")

_SMOOTHING = 0.2
"""Weight of a new measurement; older ones fade."""
_MOVED_TOKENS_MIN = 256
"""Saves and restores of fewer tokens say more about how busy the machine is than about their rate."""
_RETURN_ODDS = 0.9
"""Probability that the conversation used last returns soon; each earlier one is half as likely."""


@dataclass(slots=True)
class Costs:
    """Costs on this machine, in milliseconds; refined by `observe_*`."""

    prefill_ms: float = 2.0
    """Per token. The start value only has to be far above restoring one."""
    restore_ms: float = 0.02
    save_ms: float = 0.02
    call_ms: float = 1.0
    """Fixed part of a save or restore."""

    def restore(self, n: int) -> float:
        """Composing and restoring `n` tokens."""
        return self.call_ms + self.restore_ms * n if n else 0.0

    def save(self, n: int) -> float:
        """Saving a slot of `n` tokens: llama-server always writes all of it."""
        return self.call_ms + self.save_ms * n if n else 0.0

    def prefill(self, n: int) -> float:
        """Evaluating `n` prompt tokens."""
        return self.prefill_ms * n

    def observe_prefill(self, n: int, ms: float) -> None:
        """`n` prompt tokens took `ms`. Short prompts say more about overhead than about rate."""
        if n >= 16:
            self.prefill_ms = _blend(self.prefill_ms, ms / n)

    def observe_restore(self, n: int, ms: float) -> None:
        if n >= _MOVED_TOKENS_MIN:
            self.restore_ms = _blend(self.restore_ms, max(ms - self.call_ms, 0.0) / n)

    def observe_save(self, n: int, ms: float) -> None:
        if n >= _MOVED_TOKENS_MIN:
            self.save_ms = _blend(self.save_ms, max(ms - self.call_ms, 0.0) / n)


def _blend(old: float, new: float) -> float:
    return old + _SMOOTHING * (new - old)


@dataclass(slots=True, eq=False)
class SlotRequest:
    """A request that waits for a slot."""

    ids: Ids | None
    """Its prompt; None when its tokens are not known."""
    scope: str
    n_storable: int = 0
    """Leading tokens that the store can restore."""
    n_public: int = 0
    """Leading tokens that are public."""
    cache_prompt: bool = True
    path: Handle | None = None
    """What the store knows of its prompt but the last token; None: nothing of it is restored."""
    n_predict: int = -1
    """Maximum number of tokens of its reply; negative: no limit."""
    takes_moved: bool = True
    """Whether it may continue from moved rows."""
    n_unmoved: int = 0
    """Of `n_storable`, those whose rows are neither moved nor computed from moved ones."""
    run_tokens_min: int = 0
    """The shortest run of tokens whose rows are kept behind other text for it; 0: none is."""
    since: DeletionWatch | None = None
    """What was deleted since it began."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its client left: what is done for it alone need not go on."""
    overtaken: int = 0
    """How often a later request went first."""

    @property
    def n(self) -> int:
        return 0 if self.ids is None else len(self.ids)


async def unless_left(request: SlotRequest, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, which is ended, with None, once the request's client has left."""
    asked = asyncio.create_task(work)
    leaving = asyncio.create_task(request.left.wait())
    try:
        await asyncio.wait((asked, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        asked.cancel()
        await asyncio.wait((asked,))
    return None if asked.cancelled() else asked.result()


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """What to do for a request: put it into `slot`, which then holds `n_reused` of its tokens."""

    slot: Slot
    n_reused: int
    restore: bool = False
    """Its first `n_reused` tokens are to be restored; otherwise they are there already."""
    erase: bool = False
    """Empty the slot first: what it holds must not be used, or not be seen."""
    capture: Slot | None = None
    """Save this slot first (maybe `slot` itself): it alone has rows that are needed."""
    cost_ms: float = 0.0


class PlacementPolicy:
    """Chooses slots. `window`: tokens that sliding-window layers look back; 0: no such layers.
    `extends_only`: a slot is useful only to a prompt that begins with all it holds."""

    def __init__(
        self,
        costs: Costs,
        *,
        window: int = 0,
        extends_only: bool = False,
        can_store: bool = True,
    ) -> None:
        self.costs = costs
        self.window = window
        self.extends_only = extends_only
        self.can_store = can_store
        """Whether states can be saved and restored at all."""

    # ---- one request --------------------------------------------------------------------------

    def choose(self, request: SlotRequest, slots: Sequence[Slot]) -> SlotChoice | None:
        """The cheapest way to serve `request` in a free slot; None when all are busy."""
        free = [slot for slot in slots if not slot.busy]
        continuation = self._continuation(request, slots)
        if continuation is not None:
            return continuation
        used = sorted(slot.last_used for slot in slots)
        if request.ids is None:
            options = [self._opaque(request, slot, used) for slot in free]
        else:
            options = self._options(request, free, slots, used)
        return min(
            options, key=lambda choice: (choice.cost_ms, choice.slot.last_used), default=None
        )

    def _continuation(self, request: SlotRequest, slots: Sequence[Slot]) -> SlotChoice | None:
        """Continue in a slot that holds only the beginning of the prompt, if no other place has
        more of it. Every turn of a chat in its slot is such a case. Nothing has to leave and every
        other option evaluates more, so none has to be weighed."""
        if request.ids is None:
            return None

        def usable(slot: Slot, n: int) -> int:
            is_whole = not slot.busy and slot.n == n and self.live(request, slot) == (n, False)
            return n if is_whole else 0

        found = LiveIndex(slots).longest(request.ids, request.scope, usable=usable)
        if found.source is None or found.n < max(found.n_common, request.n_storable):
            return None
        cost_ms = self.costs.prefill(request.n - found.n)
        return SlotChoice(found.source, found.n, cost_ms=cost_ms)

    def _options(
        self, request: SlotRequest, free: Sequence[Slot], slots: Sequence[Slot], used: Sequence[int]
    ) -> list[SlotChoice]:
        """The options in each of the `free` slots; `used`: every slot's `last_used`, sorted."""
        kept = [self._keep(request, slot, used, *self.live(request, slot)) for slot in free]
        if not (self.can_store and request.cache_prompt):
            return kept
        source, n = self._best_source(request, slots)
        least_ms = self.costs.restore(n) + self.costs.prefill(request.n - n)
        if any(least_ms > each.cost_ms for each in kept):
            return kept
        restored = [
            self._restore(request, each.slot, used, n, source) for each in kept if n > each.n_reused
        ]
        return kept + restored

    def live(self, request: SlotRequest, slot: Slot) -> tuple[int, bool]:
        """How many of the request's tokens can be used in the slot, and whether the slot has to be
        emptied first because the server would use other tokens as well."""
        assert request.ids is not None
        if not slot.known:
            # A server that cannot save cannot empty slots either; it has only what it evaluated.
            return 0, self.can_store or slot.scope != request.scope or self.window > 0
        common = slot.common(request.ids)
        if slot.hidden and slot.scope != request.scope:
            return 0, True
        if not request.cache_prompt:
            return 0, False
        if slot.adapters != adapters_of(request.scope):
            return 0, True
        is_own = slot.scope == request.scope
        allowed = common if is_own else min(common, request.n_public)
        lacks_better = request.n_unmoved < common
        if not (is_own and request.takes_moved and lacks_better):
            allowed = min(allowed, slot.n_unmoved)
        if allowed < common:
            return 0, True
        if self.extends_only and (common < slot.n_all or common == request.n):
            return 0, False  # it starts over, unless it kept a checkpoint
        if self.window and 0 < common < slot.n_all:
            if slot.window_from and common < slot.window_from + self.window - 1:
                return 0, True  # with --swa-full the server would use rows that it lacks
            if common < slot.n_all - 1:
                return 0, False  # it starts over, unless it kept a checkpoint
        return common, False

    def _keep(
        self, request: SlotRequest, slot: Slot, used: Sequence[int], live: int, erase: bool
    ) -> SlotChoice:
        """Continue from what the slot holds."""
        capture = slot if self.worth_saving(slot, live) else None
        cost = self.costs.prefill(request.n - live) + self._leave(slot, live, used, capture)
        return SlotChoice(slot, live, erase=erase, capture=capture, cost_ms=cost)

    def _restore(
        self, request: SlotRequest, slot: Slot, used: Sequence[int], n: int, source: Slot | None
    ) -> SlotChoice:
        """Replace what the slot holds by `n` tokens from the store, or from `source` through it."""
        capture = source
        if capture is None and self.worth_saving(slot, 0):
            capture = slot
        if source is not None and source is not slot and self.worth_saving(slot, 0):
            # That would take two saves; only the one for the request is done, other rows are lost.
            lost = self.costs.prefill(slot.n_unsaved)
        else:
            lost = 0.0
        cost = self.costs.restore(n) + self.costs.prefill(request.n - n) + lost
        cost += self._leave(slot, 0, used, capture)
        if capture is not None and capture is not slot:
            cost += self.costs.save(capture.n)
        return SlotChoice(slot, n, restore=True, capture=capture, cost_ms=cost)

    def _opaque(self, request: SlotRequest, slot: Slot, used: Sequence[int]) -> SlotChoice:
        """A slot for unknown tokens: the one its conversation had, else the cheapest to lose."""
        if _is_opaque_of(slot, request):
            return SlotChoice(slot, 0, cost_ms=-1.0)
        capture = slot if self.worth_saving(slot, 0) else None
        foreign = slot.scope != request.scope and (slot.n > 0 or not slot.known)
        cost = self._leave(slot, 0, used, capture)
        return SlotChoice(slot, 0, erase=foreign, capture=capture, cost_ms=cost)

    def _best_source(self, request: SlotRequest, slots: Sequence[Slot]) -> tuple[Slot | None, int]:
        """Where the longest restorable prefix is: the store (None), or an idle slot that has
        to be saved first."""
        assert request.ids is not None
        best: Slot | None = None
        n_best = request.n_storable
        for slot in slots:
            if slot.busy or not slot.known or not slot.sure or slot.n_unsaved == 0:
                continue
            n = min(slot.common(request.ids), request.n - 1)
            if slot.scope != request.scope:
                n = min(n, request.n_public)
            if not request.takes_moved:
                n = min(n, slot.n_unmoved)
            if self.window and n < slot.n:
                continue  # its window rows are those before its own end
            if self.extends_only and n < slot.n_all:
                continue  # its state is that at its own end
            gain = self.costs.prefill(n - n_best) - self.costs.save(slot.n)
            if n > n_best and gain > 0:
                best, n_best = slot, n
        return best, n_best

    # ---- evicting -----------------------------------------------------------------------------

    def _leave(self, slot: Slot, n_kept: int, used: Sequence[int], capture: Slot | None) -> float:
        """The cost of keeping only `n_kept` tokens: saving what only the slot has (or losing it),
        and restoring the rest, which is the likelier the more recently it was used."""
        if slot.n_all <= n_kept and slot.known:
            return 0.0
        save = self.costs.save(slot.n) if capture is slot else 0.0
        lost = 0 if capture is slot else max(0, slot.n_all - max(slot.n_stored, n_kept))
        later = len(used) - bisect_right(used, slot.last_used)
        odds = _RETURN_ODDS * 0.5**later
        return save + odds * (self.costs.prefill(lost) + self.costs.restore(slot.n))

    def worth_saving(self, slot: Slot, n_kept: int) -> bool:
        """Whether losing rows would cost more than saving the slot."""
        if not self.can_store or not slot.known or not slot.sure:
            return False
        lost = slot.n_all - max(slot.n_stored, n_kept)
        return lost > 0 and self.costs.prefill(lost) > self.costs.save(slot.n)

    # ---- many requests ------------------------------------------------------------------------

    def next(
        self, waiting: Sequence[SlotRequest], slots: Sequence[Slot]
    ) -> tuple[SlotRequest, SlotChoice] | None:
        """The request to serve now and how; None when nothing waits or no slot is free.

        The scope with the fewest slots goes first, then the earliest request. A request whose rows
        are live in a slot that the first one would take may overtake it a limited number of
        times."""
        busy: dict[str, int] = {}
        for slot in slots:
            if slot.busy:
                busy[slot.holder] = busy.get(slot.holder, 0) + 1
        in_turn = sorted(waiting, key=lambda request: busy.get(request.scope, 0))
        for n_passed, first in enumerate(in_turn):
            choice = self.choose(first, slots)
            if choice is None:
                return None
            if not self._awaits(first, choice, slots):
                passed = {id(request) for request in in_turn[:n_passed]}
                others = [request for request in waiting if id(request) not in passed]
                return self._overtaking(first, choice, others, slots)
        return None

    def _overtaking(
        self,
        first: SlotRequest,
        choice: SlotChoice,
        waiting: Sequence[SlotRequest],
        slots: Sequence[Slot],
    ) -> tuple[SlotRequest, SlotChoice]:
        """`first`, or a later one that is live in the slot chosen for it."""
        if first.overtaken >= len(slots) or self._continues(first, choice.slot):
            return first, choice
        for later in waiting:
            if later is not first and self._continues(later, choice.slot):
                other = self.choose(later, slots)
                if other is not None:
                    first.overtaken += 1
                    return later, other
        return first, choice

    def _awaits(self, request: SlotRequest, choice: SlotChoice, slots: Sequence[Slot]) -> bool:
        """Whether waiting for a slot that is being saved is better than taking `choice`."""
        if request.ids is None:
            return False
        live = max((self.live(request, slot)[0] for slot in slots if slot.saving), default=0)
        gain = self.costs.prefill(live - choice.n_reused)
        return gain > max((self.costs.save(slot.n) for slot in slots if slot.saving), default=0.0)

    def _continues(self, request: SlotRequest, slot: Slot) -> bool:
        """Whether the slot holds most of this request's tokens, so that giving it to another
        would throw away what is about to be used."""
        if request.ids is None:
            return _is_opaque_of(slot, request)
        live, _ = self.live(request, slot)
        return 2 * live > request.n


def _is_opaque_of(slot: Slot, request: SlotRequest) -> bool:
    """Whether the slot holds unknown tokens of the request's scope."""
    return not slot.known and slot.scope == request.scope
