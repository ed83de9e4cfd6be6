"""LiveIndex, against a comparison of the prompt with every holder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from towerd.engine.live_index import Found, LiveIndex
from towerd.tokens import Ids, common_prefix

MINE, OTHER = "mine", "other"


@dataclass(frozen=True, eq=False)
class Held:
    """Some tokens in a buffer with more behind them; `step`: it is continued from its multiples."""

    ids: Ids
    n: int
    step: int = 1
    rank: int = 0
    scope: str = MINE
    n_public: int = 0

    def n_visible(self, scope: str) -> int:
        return self.n if self.scope == scope else self.n_public


def usable(held: Held, n: int) -> int:
    return n - n % held.step


def is_even(held: Held) -> bool:
    return held.rank % 2 == 0


def best_of_all(held: list[Held], ids: Ids) -> Found[Held]:
    """The same by looking at every one."""
    best: Found[Held] = Found()
    n_common = 0
    worst_first = sorted(held, key=lambda each: each.rank)
    for each in reversed(worst_first):
        if is_even(each):
            n = common_prefix(each.ids[: each.n_visible(MINE)], ids)
            n_common = max(n, n_common)
            if usable(each, n) > best.n:
                best = Found(each, usable(each, n))
    return Found(best.source, best.n, n_common)


@st.composite
def held(draw: st.DrawFn) -> Held:
    ids = np.array(draw(st.lists(st.integers(0, 1), max_size=8)), np.int32)
    n = draw(st.integers(0, len(ids)))
    scope, n_public = draw(st.sampled_from([MINE, OTHER])), draw(st.integers(0, n))
    return Held(ids, n, draw(st.integers(1, 3)), draw(st.integers(0, 4)), scope, n_public)


@given(st.lists(held(), max_size=6), st.lists(st.integers(0, 1), max_size=8))
def test_as_looking_at_every_one(all_held: list[Held], tokens: list[int]) -> None:
    ids = np.array(tokens, np.int32)
    assert LiveIndex(all_held).longest(ids, MINE, is_even, usable) == best_of_all(all_held, ids)


def test_the_holder_that_is_chosen() -> None:
    base = np.arange(8, dtype=np.int32)
    forked = np.where(base < 5, base, -1).astype(np.int32)
    index = LiveIndex[Held]()
    short, long = Held(base, 4), Held(forked, 8)
    index.add(short)
    assert index.longest(base, MINE) == Found(short, 4, 4)
    index.add(long)
    assert index.longest(base, MINE) == Found(long, 5, 5)
    index.add(again := Held(forked, 8))
    assert index.longest(base, MINE) == Found(again, 5, 5), "of equals the last that registered"
    index.add(ranked := Held(forked, 8, rank=1))
    assert index.longest(base, MINE) == Found(ranked, 5, 5)
    index.add(stepped := Held(base, 8, step=6, rank=2))
    assert index.longest(base, MINE, usable=usable) == Found(stepped, 6, 8)
    index.add(Held(base, 8, scope=OTHER, n_public=2))
    assert index.longest(base, OTHER, lambda each: each.scope == MINE).source is None
    index.remove(stepped)
    assert index.longest(base, MINE) == Found(ranked, 5, 5)
    assert index.longest(base[:0], MINE) == Found(None, 0, 0)


def test_what_is_no_longer_is_not_compared() -> None:
    """Of many chats that part at the same place, one is asked how much of it counts."""
    ids = np.arange(100, dtype=np.int32)
    chats = [Held(np.where(np.arange(100) < 50, ids, -1 - i), 100, 1, i) for i in range(20)]
    asked: list[Held] = []

    def among(each: Held) -> bool:
        asked.append(each)
        return True

    assert LiveIndex(chats).longest(ids, MINE, among) == Found(chats[-1], 50, 50)
    assert asked == [chats[-1]]
