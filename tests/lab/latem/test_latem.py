"""LATEM against an exact optimum under the same rules, its invariants, and what was found."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.latem.algorithm import Item, LatemCache
from lab.latem.optimum import Request, optimum_cost
from lab.policies.latem import Trust

REQUESTS = st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(0, 3)), max_size=60)


class Oracle:
    """Next use of every item, exactly, reversed, or at random; `now` is the next request."""

    def __init__(self, requests: Sequence[Request], kind: str = "perfect", seed: int = 0) -> None:
        self.uses: dict[Item, list[int]] = {}
        for i, (m, t) in enumerate(requests):
            self.uses.setdefault(m, []).append(i)
            if t is not None:
                self.uses.setdefault((m, t), []).append(i)
        self.kind, self.now, self._rng = kind, 0, random.Random(seed)

    def __call__(self, item: Item) -> float:
        true = next((i for i in self.uses.get(item, []) if i >= self.now), math.inf)
        if self.kind == "random":
            return self._rng.random()
        return true if self.kind == "perfect" else -true


def cost_of(
    requests: Sequence[Request], k_m: int, k_t: int, kind: str = "perfect", **options: object
) -> float:
    """What LATEM pays, its invariants checked at every step."""
    oracle = Oracle(requests, kind)
    cache = LatemCache(k_m, k_t, oracle, **options)  # type: ignore[arg-type]
    total = 0.0
    for i, (m, t) in enumerate(requests):
        oracle.now = i + 1
        cost = cache.message(m) if t is None else cache.token(m, t)
        assert cost in (0.0, cache.token_cost, 1.0)
        assert m in cache.messages
        cache.check_integrity()
        total += cost
    return total


@settings(deadline=None)
@given(
    REQUESTS,
    st.integers(1, 4),
    st.integers(0, 8),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["perfect", "reversed", "random"]),
    st.floats(0.05, 0.9),
)
def test_coherence(
    requests: list[Request],
    k_m: int,
    more: int,
    repaired: bool,
    shared: bool,
    kind: str,
    eps: float,
) -> None:
    """After every step of every variant; what was asked for costs nothing right after."""
    cost_of(
        requests,
        k_m,
        k_m + more,
        kind,
        eps=(eps / 2, eps),
        is_repaired=repaired,
        shared_pool=shared,
    )


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.none() | st.integers(0, 2)), max_size=9),
    st.integers(1, 2),
    st.integers(1, 2),
    st.booleans(),
)
def test_the_optimum_is_never_beaten(
    requests: list[Request], k_m: int, slots: int, repaired: bool
) -> None:
    """By no variant with the same allocation."""
    least = optimum_cost(requests, k_m, slots, 0.5)
    for kind in ("perfect", "reversed"):
        paid = cost_of(requests, k_m, k_m * slots, kind, is_repaired=repaired, eps=(0.5, 0.5))
        assert paid >= least - 1e-9


def test_the_optimum_against_all_choices() -> None:
    """Every sequence of evictions, written out, on one small instance."""
    requests: list[Request] = [(0, 0), (1, None), (0, 1), (2, None), (0, 0), (1, None), (0, 1)]

    def best(i: int, held: dict[int, set[int]]) -> float:
        if i == len(requests):
            return 0.0
        m, t = requests[i]
        if m in held and (t is None or t in held[m]):
            return best(i + 1, held)
        options = []
        asked: set[int] = set() if t is None else {t}
        if m in held:
            for victim in sorted(held[m]) if held[m] else [-1]:
                options.append(0.5 + best(i + 1, held | {m: held[m] - {victim} | asked}))
            return min(options)
        nothing: set[int] = set()
        for gone, own in product(sorted(held) if len(held) == 2 else [-1], [nothing, asked]):
            kept = {k: v for k, v in held.items() if k != gone}
            options.append(1.0 + best(i + 1, kept | {m: own}))
        return min(options)

    assert optimum_cost(requests, 2, 1, 0.5) == best(0, {})


def test_with_room_for_all_only_first_uses_cost() -> None:
    requests: list[Request] = [(m, t) for _ in range(3) for m in range(3) for t in (None, 0, 1)]
    assert cost_of(requests, 3, 6) == 3 * (1 + 2 * 0.5)
    assert cost_of(requests, 3, 6, shared_pool=True) == 3 * (1 + 2 * 0.5)


def test_a_message_used_through_its_tokens_is_idle_as_printed() -> None:
    """Line 28 does not mark the message: as printed it is the fallback's first victim."""
    requests: list[Request] = []
    for i in range(300):
        requests += [(0, 0), (0, 1), (1 + i % 3, None)]
    paid = [
        sum(
            cost_of(requests, 3, 6, "random", is_repaired=flag, eps=(0.05, 0.05), seed=seed)
            for seed in range(4)
        )
        for flag in (False, True)
    ]
    assert paid[0] > 1.2 * paid[1]


def test_equal_allocation_misses_for_ever_where_a_pool_does_not() -> None:
    """One message whose k_t tokens are asked for in turn has k_t / k_m slots: no constant
    factor against an optimum that shares the pool, whatever Theorem 1 says."""
    requests: list[Request] = [(0, i % 8) for i in range(400)]
    assert cost_of(requests, 4, 8, shared_pool=True) == 1 + 7 * 0.5
    assert cost_of(requests, 4, 8) > 0.5 * 150
    optimum = optimum_cost(requests[:60], 4, 2, 0.5)
    assert cost_of(requests[:60], 4, 8, eps=(0.9, 0.9)) <= 2 * optimum


def test_the_quota_caps_the_damage() -> None:
    """Round-robin over k_m + 1 messages, predictions reversed: the more trust, the more misses,
    and adaptive trust pays less than the most it may give."""
    requests: list[Request] = [(i % 17, None) for i in range(3000)]
    paid = {
        eps: cost_of(requests, 16, 16, "reversed", eps=eps)
        for eps in [(0.1, 0.1), (0.3, 0.3), (0.9, 0.9), (0.05, 0.9)]
    }
    assert paid[0.1, 0.1] < paid[0.3, 0.3] < paid[0.9, 0.9]
    assert paid[0.05, 0.9] < 0.75 * paid[0.9, 0.9]
    good = {
        eps: cost_of(requests, 16, 16, "perfect", eps=eps) for eps in [(0.05, 0.05), (0.05, 0.9)]
    }
    assert good[0.05, 0.9] <= good[0.05, 0.05]


def test_trust_stays_in_its_bounds() -> None:
    trust = Trust(0.1, 0.6)
    for _ in range(9):
        trust.was_wrong()
    assert (trust.eps, trust.quota(16)) == (0.1, 2)
    for _ in range(9):
        trust.was_right()
    assert (trust.eps, trust.quota(16)) == (0.6, 10)
    fixed = Trust(0.3, 0.3)
    fixed.was_wrong()
    assert fixed.eps == 0.3


@pytest.mark.parametrize(
    "make",
    [
        lambda: Trust(0.0, 0.5),
        lambda: Trust(0.6, 0.5),
        lambda: LatemCache(0, 4, lambda _: 0.0),
        lambda: LatemCache(2, 4, lambda _: 0.0, token_cost=1.0),
    ],
)
def test_bad_parameters(make: object) -> None:
    with pytest.raises(ValueError, match=r"trust|cannot be|token_cost"):
        make()  # type: ignore[operator]
