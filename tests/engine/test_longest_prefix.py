"""The longest prefix that something holds, against looking at every one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from towerd.engine.longest_prefix import longest_prefix
from towerd.tokens import Ids, common_prefix


@dataclass(frozen=True)
class Held:
    """Some tokens in a buffer with more behind them; `step`: it is continued from its multiples."""

    ids: Ids
    n: int
    step: int
    rank: int


@st.composite
def held(draw: st.DrawFn) -> Held:
    ids = np.array(draw(st.lists(st.integers(0, 1), max_size=8)), np.int32)
    n = draw(st.integers(0, len(ids)))
    return Held(ids, n, draw(st.integers(1, 3)), draw(st.integers(0, 2)))


@given(st.lists(held(), max_size=6), st.lists(st.integers(0, 1), max_size=8), st.booleans())
def test_as_looking_at_every_one(all_held: list[Held], tokens: list[int], by_rank: bool) -> None:
    ids = np.array(tokens, np.int32)

    def usable(each: Held, n: int) -> int:
        return n - n % each.step

    found, n = longest_prefix(
        all_held, ids, lambda each: each.n, usable, (lambda each: each.rank) if by_rank else None
    )
    given_by = [usable(each, common_prefix(each.ids[: each.n], ids)) for each in all_held]
    assert n == max(given_by, default=0)
    if n == 0:
        assert found is None
        return
    equals = [each for each, m in zip(all_held, given_by, strict=True) if m == n]
    assert found is (max(equals, key=lambda each: each.rank) if by_rank else equals[0])


def test_what_is_no_longer_is_not_compared() -> None:
    """Of many chats that part at the same place, one is asked how much of it counts."""
    ids = np.arange(100, dtype=np.int32)
    chats = [Held(np.where(np.arange(100) < 50, ids, -1 - i), 100, 1, i) for i in range(20)]
    asked: list[Held] = []

    def n_shared(each: Held) -> int:
        asked.append(each)
        return each.n

    assert longest_prefix(chats, ids, n_shared, rank=lambda each: each.rank) == (chats[-1], 50)
    assert asked == [chats[-1]]
