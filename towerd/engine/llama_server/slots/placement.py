"""Which conversation sits in which slot: pure policy over what each slot is believed to hold.

A decision weighs milliseconds: tokens to prefill, bytes to restore, bytes to save so that nothing
of worth is lost, and what it will take to bring back the conversation that has to leave. Nothing
here does I/O or looks at a clock, so that every decision can be replayed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from towerd.engine.base import SlotView
from towerd.engine.llama_server.slots.spoken import Answered, Spoken
from towerd.tokens import Ids, Provenances, common_prefix, computed_after

_EMPTY: Ids = np.zeros(0, np.int32)
_SMOOTHING = 0.2
"""Weight of a new measurement; older ones fade."""
_RETURN_ODDS = 0.9
"""How likely the conversation used last comes back soon; each one before it half as likely."""


@dataclass(slots=True)
class Costs:
    """What things take on this machine, in milliseconds; refined by `observe_*`."""

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
        if n >= 16:
            self.restore_ms = _blend(self.restore_ms, max(ms - self.call_ms, 0.0) / n)

    def observe_save(self, n: int, ms: float) -> None:
        if n >= 16:
            self.save_ms = _blend(self.save_ms, max(ms - self.call_ms, 0.0) / n)


def _blend(old: float, new: float) -> float:
    return old + _SMOOTHING * (new - old)


@dataclass(slots=True, eq=False)
class Slot:
    """What towerd believes about one slot of the server."""

    id: int
    tokens: Ids = field(default_factory=lambda: _EMPTY)
    """What it holds rows for."""
    scope: str = ""
    """Whose tokens these are."""
    known: bool = True
    """False: it holds something towerd cannot name (images, a request it did not place)."""
    n_certain: int = 0
    """Leading tokens that it certainly holds; the others are what a reply's text suggests."""
    hidden: bool = False
    """Whether it may hold more after `tokens`: a reply that nobody told us the ids of."""
    n_stored: int = 0
    """Leading tokens whose rows the store has."""
    provenance: Provenances = field(default_factory=lambda: np.zeros(0, np.uint8))
    """Of the restored leading tokens: what became of their rows (see `towerd.store.segments.format_run`)."""
    window_from: int = 0
    """The first position whose sliding-window rows it holds; earlier ones were not restored."""
    label: str = ""
    """Which opaque conversation used it last."""
    busy: bool = False
    holder: str = ""
    """Scope of the request that has it, while busy."""
    saving: bool = False
    """Busy only because it is being saved: it holds the same afterwards."""
    sure: bool = True
    """False: something may have changed it behind our back; ask before relying on it."""
    last_used: int = 0
    """Count of leases when it was released last; 0 never."""
    chat: Answered | None = None
    """The chat request that it ran last, if it holds that and its reply."""
    is_gone_on_with: bool = False
    """Whether its last request began with all that it certainly held then: the next turn of that
    chat will, too."""
    _compared: tuple[Ids, Ids, int] = field(default=(_EMPTY, _EMPTY, 0), repr=False)
    """The last two arrays that were compared, and what they share: one decision asks often."""

    @property
    def n(self) -> int:
        """Tokens it holds."""
        return len(self.tokens)

    @property
    def n_unsaved(self) -> int:
        """Tokens whose rows only this slot has."""
        return max(0, self.n - self.n_stored)

    def forget(self) -> None:
        """It is empty."""
        self.hold_restored(_EMPTY, "", 0, np.zeros(0, np.uint8))

    def hold(
        self, tokens: Ids, scope: str, *, n_certain: int | None = None, hidden: bool = False
    ) -> None:
        """It holds these tokens; of its rows those are as before whose tokens are the same."""
        self.n_stored = min(self.n_stored, self.common(tokens))
        self.provenance = self.provenance[: self.common(tokens)]
        self.tokens, self.scope = tokens, scope
        self.n_certain = len(tokens) if n_certain is None else n_certain
        self.known, self.sure, self.hidden, self.label = True, True, hidden, ""
        self.chat = None

    def hold_restored(
        self, tokens: Ids, scope: str, window_from: int, provenance: Provenances
    ) -> None:
        """It was replaced by what the store has of these tokens."""
        self.tokens, self.scope, self.provenance = tokens, scope, provenance
        self.n_certain = self.n_stored = len(tokens)
        self.window_from, self.label = window_from, ""
        self.known, self.sure, self.hidden = True, True, False
        self.chat, self.is_gone_on_with = None, False

    def provenance_of(self, n: int) -> Provenances:
        """The provenance of `n` tokens: what follows a row that is not exact is derived."""
        provenance = np.full(n, computed_after(self.provenance), np.uint8)
        provenance[: min(n, len(self.provenance))] = self.provenance[:n]
        return provenance

    def hold_unknown(self, scope: str, label: str = "") -> None:
        """It holds something of `scope` that cannot be named."""
        self.forget()
        self.scope, self.known, self.label = scope, False, label

    def view(self, n_ctx: int) -> SlotView:
        """What GET /slots may go by."""
        scope = self.scope if self.known and self.sure else ""
        scope = self.holder if self.busy else scope
        return SlotView(self.id, n_ctx, self.busy, None, self.n, 0, None, scope)

    def common(self, ids: Ids) -> int:
        """Length of the prefix that it shares with `ids`, an array that nobody changes."""
        tokens, other, n = self._compared
        if tokens is not self.tokens or other is not ids:
            n = common_prefix(self.tokens, ids)
            self._compared = (self.tokens, ids, n)
        return n


@dataclass(slots=True, eq=False, weakref_slot=True)
class Want:
    """A request that wants a slot."""

    ids: Ids | None
    """Its prompt, or None when nobody knows its tokens."""
    scope: str
    label: str = ""
    n_storable: int = 0
    """Leading tokens that the store can restore."""
    n_public: int = 0
    """Leading tokens that belong to everybody."""
    cache_prompt: bool = True
    pinned: bool = True
    """False: the request cannot name its slot, so it has to be the one the server would pick."""
    overtaken: int = 0
    """How often a later request went first."""

    @property
    def n(self) -> int:
        return 0 if self.ids is None else len(self.ids)


@dataclass(frozen=True, slots=True)
class Choice:
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


class Policy:
    """Decides. `window`: tokens that sliding-window layers look back; 0: no such layers.
    `extends_only`: a slot is of use only to a prompt that begins with all it holds."""

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

    def choose(self, want: Want, slots: Sequence[Slot]) -> Choice | None:
        """The cheapest way to serve `want` in a free slot; None when all are busy."""
        free = [slot for slot in slots if not slot.busy]
        going_on = self._continuation(want, free, slots)
        if going_on is not None:
            return going_on
        if not want.pinned:
            free = self._picked(want, free)
        used = sorted(slot.last_used for slot in slots)
        if want.ids is None:
            options = [self._opaque(want, slot, used) for slot in free]
        else:
            options = self._options(want, free, slots, used)
        return min(
            options, key=lambda choice: (choice.cost_ms, choice.slot.last_used), default=None
        )

    def _continuation(
        self, want: Want, free: Sequence[Slot], slots: Sequence[Slot]
    ) -> Choice | None:
        """To go on in a slot that holds nothing but the beginning of the prompt, where nothing
        else has more of it: what every turn of a chat in its slot comes to. Nothing has to leave
        and everything else evaluates more, so no other option has to be weighed."""
        if want.ids is None or not want.pinned:
            return None
        shared = max(slot.common(want.ids) for slot in slots)
        if shared == 0 or want.n_storable > shared:
            return None
        fitting = [
            slot for slot in free if slot.n == shared and self.live(want, slot) == (shared, False)
        ]
        if not fitting:
            return None
        slot = min(fitting, key=lambda each: each.last_used)
        return Choice(slot, shared, cost_ms=self.costs.prefill(want.n - shared))

    def _options(
        self, want: Want, free: Sequence[Slot], slots: Sequence[Slot], used: Sequence[int]
    ) -> list[Choice]:
        """What can be done in each of the `free` slots; `used`: every slot's `last_used`, sorted."""
        kept = [self._keep(want, slot, used, *self.live(want, slot)) for slot in free]
        if not (self.can_store and want.cache_prompt):
            return kept
        source, n = self._best_source(want, slots)
        least_ms = self.costs.restore(n) + self.costs.prefill(want.n - n)
        if any(least_ms > each.cost_ms for each in kept):
            return kept
        restored = [
            self._restore(want, each.slot, used, n, source) for each in kept if n > each.n_reused
        ]
        return kept + restored

    def _picked(self, want: Want, free: list[Slot]) -> list[Slot]:
        """Of the free slots the one that llama-server prefers, once any other holds all but the
        last token of this prompt: the first of those that share most. All, if none shares that
        much."""
        assert want.ids is not None
        shared = [(-slot.common(want.ids), slot.id, slot) for slot in free if slot.known]
        rivals = [each for each in shared if -each[0] >= want.n - 1]
        return [min(rivals)[2]] if rivals else free

    def live(self, want: Want, slot: Slot) -> tuple[int, bool]:
        """How many of the request's tokens can be used where they are, and whether the slot has
        to be emptied first because the server would use others too."""
        assert want.ids is not None
        if not slot.known:
            return 0, slot.scope != want.scope or self.window > 0
        common = slot.common(want.ids)
        if slot.hidden and slot.scope != want.scope:
            return 0, True
        if not want.cache_prompt:
            return 0, False
        allowed = common if slot.scope == want.scope else min(common, want.n_public)
        if allowed < common:
            return 0, True
        if self.extends_only and (common < slot.n or common == want.n):
            return 0, False  # it starts over, unless it kept a checkpoint
        if self.window and 0 < common < slot.n:
            if slot.window_from and common < slot.window_from + self.window - 1:
                return 0, True  # with --swa-full the server would use rows that it lacks
            if common < slot.n - 1:
                return 0, False  # it starts over, unless it kept a checkpoint
        return common, False

    def begins_with(self, want: Want, slot: Slot) -> bool:
        """Whether the prompt begins with all that the slot certainly holds."""
        if want.ids is None or not slot.n or slot.scope != want.scope:
            return False
        is_whole = self.window > 0 or self.extends_only
        return slot.common(want.ids) >= (slot.n if is_whole else max(slot.n_certain, 1))

    def goes_on(self, slot: Slot, spoken: Spoken, scope: str) -> bool:
        """Whether a chat goes on in this slot, so that there is nothing to decide."""
        if slot.busy or not slot.known or not slot.sure or slot.scope != scope:
            return False
        if slot.chat is None or not slot.is_gone_on_with or (self.window and slot.window_from):
            return False
        return spoken.continues(slot.chat)

    def _keep(self, want: Want, slot: Slot, used: Sequence[int], live: int, erase: bool) -> Choice:
        """Go on from what the slot holds."""
        capture = slot if self.worth_saving(slot, live) else None
        cost = self.costs.prefill(want.n - live) + self._leave(slot, live, used, capture)
        return Choice(slot, live, erase=erase, capture=capture, cost_ms=cost)

    def _restore(
        self, want: Want, slot: Slot, used: Sequence[int], n: int, source: Slot | None
    ) -> Choice:
        """Replace what the slot holds by `n` tokens from the store, or from `source` by way of it."""
        capture = source
        if capture is None and self.worth_saving(slot, 0):
            capture = slot
        if source is not None and source is not slot and self.worth_saving(slot, 0):
            # Two saves; only the one that the request needs is named, the other costs its rows.
            lost = self.costs.prefill(slot.n_unsaved)
        else:
            lost = 0.0
        cost = self.costs.restore(n) + self.costs.prefill(want.n - n) + lost
        cost += self._leave(slot, 0, used, capture)
        if capture is not None and capture is not slot:
            cost += self.costs.save(capture.n)
        return Choice(slot, n, restore=True, capture=capture, cost_ms=cost)

    def _opaque(self, want: Want, slot: Slot, used: Sequence[int]) -> Choice:
        """A slot for unknown tokens: the one its conversation had, else the one least missed."""
        own = not slot.known and slot.scope == want.scope and slot.label == want.label != ""
        if own:
            return Choice(slot, 0, cost_ms=-1.0)
        capture = slot if self.worth_saving(slot, 0) else None
        foreign = slot.scope != want.scope and (slot.n > 0 or not slot.known)
        cost = self._leave(slot, 0, used, capture)
        return Choice(slot, 0, erase=foreign, capture=capture, cost_ms=cost)

    def _best_source(self, want: Want, slots: Sequence[Slot]) -> tuple[Slot | None, int]:
        """Where the longest restorable prefix is: the store (None), or an idle slot that has
        to be saved first."""
        assert want.ids is not None
        best: Slot | None = None
        n_best = want.n_storable
        for slot in slots:
            if slot.busy or not slot.known or not slot.sure or slot.n_unsaved == 0:
                continue
            n = min(slot.common(want.ids), want.n - 1)
            if slot.scope != want.scope:
                n = min(n, want.n_public)
            if self.window and n < slot.n:
                continue  # its window rows are those before its own end
            gain = self.costs.prefill(n - n_best) - self.costs.save(slot.n)
            if n > n_best and gain > 0:
                best, n_best = slot, n
        return best, n_best

    # ---- what leaves --------------------------------------------------------------------------

    def _leave(self, slot: Slot, n_kept: int, used: Sequence[int], capture: Slot | None) -> float:
        """What it costs that only `n_kept` tokens stay: saving what only it has (or losing it),
        and bringing the rest back, the likelier the later it was used."""
        if slot.n <= n_kept and slot.known:
            return 0.0
        save = self.costs.save(slot.n) if capture is slot else 0.0
        lost = 0 if capture is slot else max(0, slot.n - max(slot.n_stored, n_kept))
        later = len(used) - bisect_right(used, slot.last_used)
        odds = _RETURN_ODDS * 0.5**later
        return save + odds * (self.costs.prefill(lost) + self.costs.restore(slot.n))

    def worth_saving(self, slot: Slot, n_kept: int) -> bool:
        """Whether rows that would be lost are dearer than saving the slot."""
        if not self.can_store or not slot.known or not slot.sure:
            return False
        lost = slot.n - max(slot.n_stored, n_kept)
        return lost > 0 and self.costs.prefill(lost) > self.costs.save(slot.n)

    # ---- many requests ------------------------------------------------------------------------

    def next(self, waiting: Sequence[Want], slots: Sequence[Slot]) -> tuple[Want, Choice] | None:
        """The request to serve now and how; None when nothing waits or no slot is free.

        The scope with the fewest slots goes first, then who came first. A request whose rows are
        live in a slot that the first one would take may go before it, but only so often."""
        busy: dict[str, int] = {}
        for slot in slots:
            if slot.busy:
                busy[slot.holder] = busy.get(slot.holder, 0) + 1
        in_turn = sorted(waiting, key=lambda want: busy.get(want.scope, 0))
        for n_passed, first in enumerate(in_turn):
            choice = self.choose(first, slots)
            if choice is None:
                return None
            if not self._awaits(first, choice, slots):
                passed = {id(want) for want in in_turn[:n_passed]}
                others = [want for want in waiting if id(want) not in passed]
                return self._overtaking(first, choice, others, slots)
        return None

    def _overtaking(
        self, first: Want, choice: Choice, waiting: Sequence[Want], slots: Sequence[Slot]
    ) -> tuple[Want, Choice]:
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

    def _awaits(self, want: Want, choice: Choice, slots: Sequence[Slot]) -> bool:
        """Whether a slot that is being saved is worth waiting for rather than to take `choice`."""
        if want.ids is None:
            return False
        live = max((self.live(want, slot)[0] for slot in slots if slot.saving), default=0)
        gain = self.costs.prefill(live - choice.n_reused)
        return gain > max((self.costs.save(slot.n) for slot in slots if slot.saving), default=0.0)

    def _continues(self, want: Want, slot: Slot) -> bool:
        """Whether the slot holds most of this request's tokens, so that giving it to another
        would throw away what is about to be used."""
        if want.ids is None:
            return not slot.known and slot.label == want.label != "" and slot.scope == want.scope
        live, _ = self.live(want, slot)
        return 2 * live > want.n
