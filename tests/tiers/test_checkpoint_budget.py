"""Which state checkpoints are evicted first, against a plain model of the same rule."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from store_tools import ROW_IDENTITY

from towerd.store import Store
from towerd.store.rows.checkpoints import StateCheckpoint
from towerd.tiers.checkpoint_tier import NEAR_TOKENS, WAYS_MAX, CheckpointTier

Tokens = tuple[int, ...]

CHATS = st.lists(
    st.tuples(
        st.integers(0, 5),  # which earlier chat it begins like
        st.integers(0, 300),  # how far
        st.integers(1, 200),  # how many tokens it adds
        st.lists(st.integers(1, 400), min_size=1, max_size=6),  # where states are taken
    ),
    min_size=1,
    max_size=6,
)
FILE_BYTES = 4096 + 100


class Model:
    """Conversations as tuples, states as prefixes."""

    def __init__(self) -> None:
        self.chats: list[Tokens] = []
        self.states: set[Tokens] = set()

    def worth(self, state: Tokens) -> float:
        """Tokens saved, for each way on from there, by how far back they lie: tried on every other state and
        every chat."""
        before = max(
            (len(s) for s in self.states if s != state and state[: len(s)] == s), default=0
        )
        ends = [
            len(chat) - len(state)
            for chat in self.chats
            if chat[: len(state)] == state
            and not any(o != chat and o[: len(chat)] == chat for o in self.chats)
        ]
        saves = len(state) - before
        if min(ends) == 0:
            saves = max(saves, NEAR_TOKENS)
        ways = {
            chat[len(state)]
            for chat in self.chats
            if len(chat) > len(state) and chat[: len(state)] == state
        }
        return min(max(1, len(ways)), WAYS_MAX) * saves / (NEAR_TOKENS + min(ends))


def build(
    store: Store, tier: CheckpointTier, chats: list[tuple[int, int, int, list[int]]]
) -> Model:
    model = Model()
    for number, (like, n_like, n_own, places) in enumerate(chats):
        start = model.chats[like % number][:n_like] if number else ()
        chat = (*start, *range(1000 * number + 1, 1000 * number + n_own + 1))
        ids = np.array(chat, np.int32)
        store.insert(ids, "local", [len(ids)])
        taken = {place: np.zeros(100, np.uint8) for place in places if place <= len(chat)}
        tier.accept(ids, "local", {place: (data, False) for place, data in taken.items()})
        model.chats.append(chat)
        model.states |= {chat[:place] for place in taken}
    tier.flush()
    return model


def prefix(found: StateCheckpoint) -> Tokens:
    return tuple(found.node.prefix_ids().tolist())


@settings(max_examples=25, deadline=None)
@given(chats=CHATS)
def test_the_state_that_leaves_saves_least(chats: list[tuple[int, int, int, list[int]]]) -> None:
    """One after the other, until none is left."""
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder), ROW_IDENTITY) as store:
        tier = CheckpointTier(store, bytes_max=1 << 30, exact=False, clock=lambda: 0.0)
        try:
            model = build(store, tier, chats)
            assert {prefix(found) for found in tier.table.all()} == model.states
            while model.states:
                least = min(model.worth(state) for state in model.states)
                tier.bytes_max = tier.table.file_bytes - 1
                tier.flush()
                (victim,) = model.states - {prefix(found) for found in tier.table.all()}
                assert np.isclose(model.worth(victim), least)
                model.states.remove(victim)
            assert tier.table.file_bytes == 0
        finally:
            tier.close()


def test_no_number_of_short_prompts_outweighs_a_long_conversation() -> None:
    prefix_of_many, long = 2 * NEAR_TOKENS, 3 * NEAR_TOKENS * WAYS_MAX
    chats = [(0, 0, prefix_of_many, [prefix_of_many]), (0, 0, long + 1, [long])]
    chats += [(0, prefix_of_many, 1, []) for _ in range(4 * WAYS_MAX)]
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder), ROW_IDENTITY) as store:
        tier = CheckpointTier(store, bytes_max=1 << 30, exact=False, clock=lambda: 0.0)
        try:
            build(store, tier, chats)
            tier.bytes_max = tier.table.file_bytes - 1
            tier.flush()
            assert sorted(found.position for found in tier.table.all()) == [long]
        finally:
            tier.close()


@settings(max_examples=15, deadline=None)
@given(chats=CHATS, n_max=st.integers(1, 8))
def test_the_budget_holds(chats: list[tuple[int, int, int, list[int]]], n_max: int) -> None:
    """Whatever comes, the files take no more than they may, and all that is left is whole."""
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder), ROW_IDENTITY) as store:
        bytes_max = n_max * (FILE_BYTES + 200)
        tier = CheckpointTier(store, bytes_max=bytes_max, exact=False, clock=lambda: 0.0)
        try:
            model = build(store, tier, chats)
            files = list(tier.table.folder.iterdir())
            assert sum(path.stat().st_size for path in files) == tier.table.file_bytes <= bytes_max
            assert len(files) == len(tier.table.all()) == min(len(model.states), len(files))
            assert store.verify().ok
        finally:
            tier.close()
