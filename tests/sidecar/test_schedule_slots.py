"""Which conversation gets which slot: decisions alone, without a server or a clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.engine.llama_server.slots.placement import (
    Costs,
    PlacementPolicy,
    SlotChoice,
    SlotRequest,
)
from towerd.engine.llama_server.slots.slot import Slot
from towerd.tokens import Ids, Provenance


def ids(n: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(300, 30000, n).astype(np.int32)


def filled(slot_id: int, tokens: Ids, *, used: int = 1, stored: int = 0, scope: str = "a") -> Slot:
    """A slot that holds `tokens`, the first `stored` of them in the store too."""
    slot = Slot(slot_id, last_used=used)
    slot.hold(tokens, scope)
    slot.n_stored = stored
    return slot


def choose(policy: PlacementPolicy, request: SlotRequest, *slots: Slot) -> SlotChoice:
    choice = policy.choose(request, slots)
    assert choice is not None
    return choice


@pytest.fixture
def policy() -> PlacementPolicy:
    return PlacementPolicy(Costs())


def test_a_chat_goes_on_where_it_is(policy: PlacementPolicy) -> None:
    """No restore, no save, no erase: steady chatting costs nothing."""
    chat = ids(100)
    request = SlotRequest(np.concatenate([chat, ids(10, 1)]), "a", n_storable=100)
    own, other = filled(0, chat, stored=50), filled(1, ids(80, 2), used=9)
    choice = choose(policy, request, other, own)
    assert (choice.slot, choice.n_reused) == (own, 100)
    assert (choice.restore, choice.erase, choice.capture) == (False, False, None)


def test_moved_rows_are_for_those_who_take_them(policy: PlacementPolicy) -> None:
    """Within their scope, and while the store has no others. llama-server would use them unasked, so
    the slot is emptied for all others."""
    chat = ids(100)
    slot = Slot(0)
    provenance = np.full(100, Provenance.AFTER_MOVED, np.uint8)
    provenance[:30] = Provenance.EXACT
    slot.hold_restored(chat, "a", 0, provenance)
    assert slot.n_unmoved == 30
    longer = np.concatenate([chat, ids(9, 1)])
    assert policy.live(SlotRequest(longer, "a"), slot) == (100, False)
    assert policy.live(SlotRequest(longer, "a", takes_moved=False), slot) == (0, True)
    assert policy.live(SlotRequest(longer, "b", n_public=100), slot) == (0, True)
    assert policy.live(SlotRequest(longer, "a", n_storable=100, n_unmoved=100), slot) == (0, True)
    other = np.concatenate([chat[:30], ids(50, 2)])
    assert policy.live(SlotRequest(other, "a", takes_moved=False), slot) == (30, False)


def test_an_empty_slot_is_taken_before_a_full_one(policy: PlacementPolicy) -> None:
    """Whatever the store has is restored there; no chat has to leave."""
    request = SlotRequest(ids(200), "a", n_storable=150)
    empty = Slot(2)
    choice = choose(policy, request, filled(0, ids(90, 1)), filled(1, ids(90, 2)), empty)
    assert (choice.slot, choice.restore, choice.n_reused) == (empty, True, 150)
    assert choice.capture is None


def test_the_longest_unused_leaves(policy: PlacementPolicy) -> None:
    """Among slots whose rows are all stored it is recency that counts."""
    slots = [filled(i, ids(100, i), used=used, stored=100) for i, used in enumerate((3, 1, 2))]
    choice = choose(policy, SlotRequest(ids(50, 9), "a"), *slots)
    assert choice.slot is slots[1]
    assert choice.capture is None


def test_rows_of_worth_are_saved_first(policy: PlacementPolicy) -> None:
    """A slot with many tokens of its own is saved before it is given away; for a few tokens
    saving all of it would cost more than computing them again."""
    many, few = filled(0, ids(500), stored=100), filled(0, ids(500), stored=499)
    assert choose(policy, SlotRequest(ids(50, 9), "a"), many).capture is many
    policy.costs.save_ms = 1.0
    assert choose(policy, SlotRequest(ids(50, 9), "a"), few).capture is None


def test_a_base_in_another_slot_is_captured_and_restored(policy: PlacementPolicy) -> None:
    """A new chat over a base that only an idle slot has: that slot is saved, and both keep it."""
    base = ids(1000)
    first = filled(0, np.concatenate([base, ids(200, 1)]))
    request = SlotRequest(np.concatenate([base, ids(50, 2)]), "a")
    choice = choose(policy, request, first, Slot(1))
    assert choice.slot.id == 1
    assert (choice.restore, choice.n_reused, choice.capture) == (True, 1000, first)


def test_short_prompts_are_computed(policy: PlacementPolicy) -> None:
    """Restoring less than it costs to restore is not worth it."""
    policy.costs.call_ms = 50.0
    choice = choose(policy, SlotRequest(ids(20), "a", n_storable=10), Slot(0))
    assert not choice.restore
    assert choice.n_reused == 0


def test_another_tenants_tokens_are_not_used(policy: PlacementPolicy) -> None:
    """Nor is it left to the server to find them: the slot is emptied. What is public may stay."""
    chat = ids(100)
    theirs = filled(0, chat, scope="b", stored=100)
    choice = choose(policy, SlotRequest(chat, "a"), theirs)
    assert (choice.n_reused, choice.erase) == (0, True)
    public = SlotRequest(np.concatenate([chat, ids(5, 1)]), "a", n_public=100)
    assert policy.live(public, theirs) == (100, False)
    theirs.hidden = True  # a reply whose tokens are not known may follow the public ones
    assert policy.live(public, theirs) == (0, True)


def test_nothing_is_reused_unasked(policy: PlacementPolicy) -> None:
    """cache_prompt=false: no restore, and what is live is left to the server to drop."""
    chat = ids(100)
    request = SlotRequest(chat, "a", n_storable=90, cache_prompt=False)
    choice = choose(policy, request, filled(0, chat))
    assert (choice.n_reused, choice.restore) == (0, False)


def test_nothing_is_stored_where_it_does_not_work() -> None:
    """Without composition slots are only chosen, by what they hold."""
    policy = PlacementPolicy(Costs(), can_store=False)
    chat = ids(100)
    slots = [filled(0, ids(100, 1)), filled(1, chat)]
    choice = choose(
        policy, SlotRequest(np.append(chat, 7).astype(np.int32), "a", n_storable=99), *slots
    )
    assert (choice.slot, choice.restore, choice.capture) == (slots[1], False, None)


def test_windows() -> None:
    """With sliding-window layers a prefix inside a slot is not certain to be usable; in a slot
    that was restored without it, it must not be used."""
    policy = PlacementPolicy(Costs(), window=40)
    chat = ids(100)
    slot = filled(0, chat)
    inside = SlotRequest(np.concatenate([chat[:60], ids(9, 1)]), "a")
    assert policy.live(inside, slot) == (0, False)
    assert policy.live(SlotRequest(np.append(chat, 5).astype(np.int32), "a"), slot) == (100, False)
    slot.hold_restored(chat, "a", 61, np.zeros(100, np.uint8))
    assert policy.live(inside, slot) == (0, True)
    assert policy.live(SlotRequest(np.append(chat, 5).astype(np.int32), "a"), slot) == (100, False)


def test_opaque_conversations_keep_their_slot(policy: PlacementPolicy) -> None:
    """Images and the like: where such a prompt was last, never with what another tenant left."""
    slots = [Slot(0, last_used=5), Slot(1, last_used=1)]
    slots[0].hold_unknown("a")
    slots[1].hold_unknown("b")
    own = choose(policy, SlotRequest(None, "a"), *slots)
    assert (own.slot, own.erase) == (slots[0], False)
    slots[0].busy = True
    other = choose(policy, SlotRequest(None, "a"), *slots)
    assert (other.slot, other.erase) == (slots[1], True)


def test_what_is_not_known_is_not_continued(policy: PlacementPolicy) -> None:
    """Not even by its own tenant: its rows may be moved ones. What cannot save cannot be emptied either,
    and has none."""
    slot, request = Slot(0), SlotRequest(ids(10), "a", takes_moved=False)
    slot.hold_unknown("a")
    assert policy.live(request, slot) == (0, True)
    policy.can_store = False
    assert policy.live(request, slot) == (0, False)


def test_all_busy(policy: PlacementPolicy) -> None:
    slot = filled(0, ids(10))
    slot.busy = True
    assert policy.choose(SlotRequest(ids(10), "a"), [slot]) is None
    assert policy.next([SlotRequest(ids(10), "a")], [slot]) is None
    assert policy.next([], [Slot(0)]) is None


def test_tenants_take_turns(policy: PlacementPolicy) -> None:
    """One who has slots waits for one who has none, however many requests he sends."""
    busy = Slot(0, busy=True, holder="greedy")
    greedy = [SlotRequest(ids(10, i), "greedy") for i in range(5)]
    modest = SlotRequest(ids(10, 9), "modest")
    found = policy.next([*greedy, modest], [busy, Slot(1)])
    assert found is not None
    assert found[0] is modest


def test_who_is_there_may_go_first_but_not_for_ever(policy: PlacementPolicy) -> None:
    """A request that continues the only free slot overtakes one that would evict it; after as
    many times as there are slots the other one goes."""
    chat = ids(100)
    slot = filled(0, chat)
    stranger = SlotRequest(ids(100, 1), "a")
    own = SlotRequest(np.append(chat, 5).astype(np.int32), "a")
    order = []
    for _ in range(3):
        found = policy.next([stranger, own], [slot])
        assert found is not None
        order.append(found[0])
    assert order == [own, stranger, stranger]


def test_a_slot_that_is_being_saved_is_waited_for(policy: PlacementPolicy) -> None:
    """Its own chat waits the moment that a save takes; another one does not, and goes first."""
    chat = ids(100)
    saved, empty = filled(0, chat), Slot(1)
    saved.busy = saved.saving = True
    own, stranger = (
        SlotRequest(np.append(chat, 5).astype(np.int32), "a"),
        SlotRequest(ids(100, 1), "a"),
    )
    assert policy.next([own], [saved, empty]) is None
    found = policy.next([own, stranger], [saved, empty])
    assert found is not None
    assert found[0] is stranger
    saved.saving = False  # it runs a request: that may take long
    found = policy.next([own], [saved, empty])
    assert found is not None
    assert found[1].slot is empty


def test_a_state_that_cannot_be_cut() -> None:
    """Only a prompt that begins with all that a slot holds, and has more, continues from it."""
    policy = PlacementPolicy(Costs(), extends_only=True, can_store=False)
    chat = ids(100)
    slot = filled(0, chat)
    for n, live in ((120, 100), (100, 0), (60, 0)):
        request = SlotRequest(np.concatenate([chat, ids(20, 1)])[:n], "a")
        assert policy.live(request, slot) == (live, False)
    assert policy.live(SlotRequest(np.concatenate([chat[:50], ids(80, 2)]), "a"), slot) == (
        0,
        False,
    )


def test_costs_follow_what_is_measured() -> None:
    """Short samples say nothing; long ones move the estimate towards themselves."""
    costs = Costs(prefill_ms=2.0, call_ms=1.0)
    costs.observe_prefill(3, 900.0)
    assert costs.prefill_ms == 2.0
    for _ in range(50):
        costs.observe_prefill(100, 700.0)
        costs.observe_restore(1000, 101.0)
        costs.observe_save(1000, 201.0)
    assert costs.prefill_ms == pytest.approx(7.0, rel=0.01)
    assert costs.restore_ms == pytest.approx(0.1, rel=0.01)
    assert costs.save_ms == pytest.approx(0.2, rel=0.01)


def test_records_of_a_slot() -> None:
    """What is stored stays stored for the prefix that stays the same."""
    slot = Slot(0)
    slot.hold_restored(ids(50), "a", 0, np.full(50, 2, np.uint8))
    assert (slot.n, slot.n_stored, slot.n_unsaved) == (50, 50, 0)
    longer = np.concatenate([ids(50)[:30], ids(40, 1)])
    slot.hold(longer, "a")
    assert (slot.n, slot.n_stored, slot.n_unsaved) == (70, 30, 40)
    assert slot.provenance_of(70).tolist() == [2] * 30 + [1] * 40
    slot.forget()
    assert (slot.n, slot.n_stored, slot.known) == (0, 0, True)


tokens_few = st.lists(st.integers(1, 2), max_size=8)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(tokens_few, tokens_few), min_size=1, max_size=6))
def test_what_a_slot_shares(pairs: Sequence[tuple[list[int], list[int]]]) -> None:
    """With whatever it holds by now and whatever is asked, over and over."""
    slot = Slot(0)
    for held, asked in pairs:
        slot.hold(np.array(held, np.int32), "a")
        for other in (asked, held, asked):
            n = next(
                (i for i, (x, y) in enumerate(zip(held, other, strict=False)) if x != y),
                min(len(held), len(other)),
            )
            prompt = np.array(other, np.int32)
            assert slot.common(prompt) == slot.common(prompt) == n


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 3)), min_size=2, max_size=5
    ),
    st.integers(0, 3),
    st.integers(2, 60),
    st.integers(0, 59),
)
def test_nothing_dearer_than_needed_is_chosen(
    held: Sequence[tuple[int, int, int]], chat: int, n: int, n_storable: int
) -> None:
    """Of all slots the one that is cheapest when it is the only one that is free."""
    policy = PlacementPolicy(Costs())
    slots = [
        filled(i, ids(60, c)[:length], used=used, stored=length)
        for i, (c, length, used) in enumerate(held)
    ]
    request = SlotRequest(ids(60, chat)[:n], "a", n_storable=min(n_storable, n - 1))
    alone = []
    for free in slots:
        for slot in slots:
            slot.busy = slot is not free
        alone.append(choose(policy, request, *slots))
        free.busy = False
    for slot in slots:
        slot.busy = False
    found = choose(policy, request, *slots)
    least = min((choice.cost_ms, choice.slot.last_used) for choice in alone)
    assert (found.cost_ms, found.slot.last_used) == least
    assert found in alone


@pytest.mark.timeout(30)
def test_thousands_wait_for_a_slot_that_is_saved(policy: PlacementPolicy) -> None:
    """However many they are, another scope's request goes first."""
    chat = ids(400)
    saved, other = filled(0, chat), Slot(1)
    saved.busy = saved.saving = True
    waiting = [SlotRequest(np.concatenate([chat, ids(1)]), "a") for _ in range(1500)]
    assert policy.next(waiting, [saved, other]) is None
    last = SlotRequest(ids(5, 3), "a")
    assert policy.next([*waiting, last], [saved, other]) == (
        last,
        SlotChoice(other, 0, cost_ms=10.0),
    )


class Play:
    """A server of slots that does what it is told: chats come in any order, each turn longer."""

    def __init__(self, n_slots: int) -> None:
        self.policy = PlacementPolicy(Costs())
        self.slots = [Slot(i) for i in range(n_slots)]
        self.stored: dict[int, int] = {}
        self.turn = 0

    def ask(self, chat: int, n: int) -> SlotChoice:
        """One turn of `chat` with `n` tokens; returns what was decided."""
        self.turn += 1
        tokens = ids(4000, chat)[:n]
        request = SlotRequest(tokens, "a", n_storable=min(self.stored.get(chat, 0), n - 1))
        choice = self.policy.choose(request, self.slots)
        assert choice is not None
        if choice.capture is not None:
            owner = self.owner(choice.capture)
            self.stored[owner] = max(self.stored.get(owner, 0), choice.capture.n)
            choice.capture.n_stored = choice.capture.n
        slot = choice.slot
        if choice.restore:
            slot.hold_restored(
                tokens[: choice.n_reused], "a", 0, np.zeros(choice.n_reused, np.uint8)
            )
        slot.hold(tokens, "a")
        slot.last_used = self.turn
        return choice

    def owner(self, slot: Slot) -> int:
        return next(c for c in range(50) if slot.common(ids(4000, c)) == slot.n)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 3))
def test_any_order_of_chats(order: Sequence[int], n_slots: int) -> None:
    """Whatever comes: what is claimed to be reused is in the slot or in the store, and a chat that
    fits is never restored while it is live."""
    play = Play(n_slots)
    length: dict[int, int] = {}
    for chat in order:
        n = length[chat] = length.get(chat, 100) + 50
        live = max((s.n for s in play.slots if s.n and s.common(ids(4000, chat)) == s.n), default=0)
        choice = play.ask(chat, n)
        assert choice.n_reused <= max(live, play.stored.get(chat, 0))
        if live == n - 50:
            assert not choice.restore
            assert choice.n_reused == live
        assert not choice.erase


def test_chats_that_fit_are_never_moved() -> None:
    """As many chats as slots: each is placed once, and then nothing is saved or restored."""
    play = Play(3)
    for turn in range(10):
        for chat in range(3):
            choice = play.ask(chat, 100 + 50 * turn)
            assert not choice.restore
            assert choice.capture is None
    assert not play.stored
