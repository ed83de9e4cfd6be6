"""Each policy against its paper's algorithm in plain Python, and invariants of all policies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import retained
from hypothesis import given
from hypothesis import strategies as st

from lab.reference.array_keys import ArrayKeys
from towerd.retention import NAMES, View, open_retention, retention_config
from towerd.retention.buzz import Buzz, BuzzConfig, threshold_per_window
from towerd.retention.h2o import H2O, H2OConfig
from towerd.retention.latem import Latem, LatemConfig, asked, shares
from towerd.retention.snapkv import SnapKV, SnapKVConfig
from towerd.retention.streaming import Streaming, StreamingConfig

seeds = st.integers(0, 2**32 - 1)
ends = st.tuples(st.integers(0, 5), st.integers(1, 9))


@given(seeds, st.integers(0, 60), ends, st.integers(0, 40))
def test_streaming_is_the_oldest_evicted(
    seed: int, n: int, end: tuple[int, int], room: int
) -> None:
    sink, window = end
    view, n_max = retained.random_view(seed, n), sink + window + room
    kept = Streaming(StreamingConfig(sink, window)).keep(view, n_max)
    assert kept.tolist() == retained.streaming(view, n_max, sink)


@given(seeds, st.integers(0, 60), ends, st.integers(0, 40))
def test_h2o_is_the_papers(seed: int, n: int, end: tuple[int, int], room: int) -> None:
    sink, window = end
    view, n_max = retained.random_view(seed, n), sink + window + room
    kept = H2O(H2OConfig(sink, window, half_life=math.inf, pool=1)).keep(view, n_max)
    assert kept.tolist() == retained.h2o(view, n_max, sink, window)
    pooled = H2O(H2OConfig(sink, window)).keep(view, n_max)
    votes = replace(view, recent=view.mass)
    assert pooled.tolist() == retained.snapkv(votes, n_max, sink, window, H2OConfig().pool)


@given(seeds, st.integers(0, 60), ends, st.integers(0, 40), st.sampled_from((1, 3, 7)))
def test_snapkv_is_the_papers(
    seed: int, n: int, end: tuple[int, int], room: int, pool: int
) -> None:
    sink, window = end
    view, n_max = retained.random_view(seed, n), sink + window + room
    kept = SnapKV(SnapKVConfig(sink, window, pool)).keep(view, n_max)
    assert kept.tolist() == retained.snapkv(view, n_max, sink, window, pool)


@given(
    seeds,
    st.integers(3, 9),
    st.sampled_from((1, 4)),
    ends,
    st.integers(0, 40),
    st.lists(st.integers(1, 60), min_size=1),
)
def test_buzz_is_algorithm_1_over_many_evictions(
    seed: int, stride: int, part: int, end: tuple[int, int], room: int, more: list[int]
) -> None:
    """Prompts longer than the container included: sampling continues until it fits."""
    config = BuzzConfig(end[0], end[1], stride=stride, sampled_part=part)
    policy, paper = Buzz(config), retained.Buzz(config)
    view, n_max = retained.random_view(seed, 30), config.n_min + room
    for step, n_new in enumerate(more):
        kept = policy.keep(view, n_max)
        assert kept.tolist() == paper.evict(view, n_max)
        view = retained.grown(view, kept, n_new, seed + step)


@given(
    seeds,
    ends,
    st.integers(0, 40),
    st.integers(1, 4),
    st.sampled_from((0.1, 0.3, 0.9)),
    st.lists(st.integers(1, 60), min_size=1),
)
def test_latem_is_algorithm_1_over_many_evictions(
    seed: int, end: tuple[int, int], room: int, k_m: int, trust: float, more: list[int]
) -> None:
    config = LatemConfig(end[0], end[1], k_m, trust)
    policy, paper = Latem(config), retained.Latem(config)
    view, n_max = retained.random_view(seed, 40), config.n_min + room
    for step, n_new in enumerate(more):
        kept = policy.keep(view, n_max)
        assert kept.tolist() == paper.evict(view, n_max)
        check_coherence(view, kept, config)
        view = retained.grown(view, kept, n_new, seed + step)


@given(
    seeds,
    ends,
    st.integers(0, 40),
    st.integers(1, 4),
    st.sampled_from((0.1, 0.3, 0.9)),
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
)
def test_latem_fetches_what_it_misses(
    seed: int, end: tuple[int, int], room: int, k_m: int, trust: float, more: list[int]
) -> None:
    """What was evicted is asked as well, and comes back if it is looked for."""
    config = LatemConfig(end[0], end[1], k_m, trust)
    policy, paper = Latem(config), retained.Latem(config)
    view, n_max = retained.random_view(seed, 40), config.n_min + room
    for step, n_new in enumerate(more):
        kept = policy.keep(view, n_max)
        assert kept.tolist() == paper.evict(view, n_max)
        check_coherence(view, kept, config)
        view = retained.recallable(view, kept, n_new, seed + step)


def test_a_message_that_is_looked_for_comes_back() -> None:
    """A query that is one evicted position's key brings that position back, with its message."""
    config = LatemConfig(2, 4, messages_max=1)
    policy, n = Latem(config), 60
    positions, messages = np.arange(n), np.arange(n) // 20
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((1, 1, n, 16)).astype(np.float32)

    def view(looked_for: int, live: np.ndarray | None) -> View:
        queries = 8 * keys[:, :, looked_for : looked_for + 1]
        mass = np.zeros(n, np.float32)
        return View(
            positions,
            n,
            mass=mass,
            messages=messages,
            keys=ArrayKeys(keys),
            queries=queries,
            live=live,
        )

    kept = policy.keep(view(30, None), 20)
    assert 30 in kept
    assert 10 not in kept
    back = policy.keep(view(10, np.isin(positions, kept)), 20)
    assert 10 in back
    assert 30 not in back, "one message fits"


@given(seeds, st.integers(1, 60))
def test_what_is_looked_for_is_attention_to_all_keys(seed: int, n: int) -> None:
    view = retained.random_view(seed, n)
    assert view.keys is not None
    found = asked(view, range(view.keys.shape[0]), 1)
    np.testing.assert_allclose(found, retained.looked_at(view), rtol=1e-4, atol=1e-6)


def check_coherence(view: View, kept: np.ndarray, config: LatemConfig) -> None:
    """Between the ends there are tokens of at most k_m messages, if anything had to go."""
    assert view.messages is not None
    if len(kept) < view.n:
        middle = kept[config.sink : len(kept) - config.window]
        messages = view.messages[np.searchsorted(view.positions, middle)]
        assert len(np.unique(messages)) <= config.messages_max


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds, budget=st.integers(8, 200), more=st.lists(st.integers(1, 300), max_size=6))
def test_invariants(name: str, seed: int, budget: int, more: list[int]) -> None:
    """The budget holds, sink and window stay, nothing is invented or repeated."""
    config = retention_config(name, budget)
    policy = open_retention(config)
    sink, window = config.sink, config.window
    view = retained.random_view(seed, budget + 20)
    for step, n_new in enumerate([1, *more]):
        kept = policy.keep(view, budget)
        assert len(kept) <= budget
        assert (np.diff(kept) > 0).all()
        assert np.isin(kept, view.positions).all()
        assert np.array_equal(kept[:sink], view.positions[:sink])
        assert np.array_equal(kept[-window:], view.positions[-window:])
        view = retained.grown(view, kept, n_new, seed + step)


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds, n=st.integers(0, 80))
def test_what_fits_stays(name: str, seed: int, n: int) -> None:
    view = retained.random_view(seed, n)
    policy = open_retention(retention_config(name, 80))
    assert np.array_equal(policy.keep(view, 80), view.positions)


@pytest.mark.parametrize("name", NAMES)
def test_branches_of_a_chat_decide_apart(name: str) -> None:
    """What one branch decides later does not change what the other does."""
    policy = open_retention(retention_config(name, 60))
    view = retained.random_view(1, 100)
    kept = policy.keep(view, 60)
    branch, twin = policy.fork(), policy.fork()
    for seed in range(5):
        branch.keep(retained.grown(view, kept, 90, seed), 60)
    view = retained.grown(view, kept, 90, 7)
    assert np.array_equal(policy.keep(view, 60), twin.keep(view, 60))


def edited(view: View, kept: np.ndarray, n: int, n_new: int, seed: int) -> View:
    """What the chat of `view` looks like after `kept` stayed, all from token `n` on was taken back
    and `n_new` others came in a message of their own."""
    stays = kept[kept < n]
    assert view.messages is not None
    before = view.messages[view.positions < n]
    shorter = replace(view, n_seen=n, messages=before, positions=view.positions[view.positions < n])
    return retained.grown(shorter, stays, n_new, seed)


@given(seeds, st.integers(3, 9), ends, st.integers(1, 40), st.integers(6, 110))
def test_buzz_after_an_edit(
    seed: int, stride: int, end: tuple[int, int], room: int, n: int
) -> None:
    """Tokens that replace old ones are new."""
    config = BuzzConfig(end[0], end[1], stride=stride)
    policy, paper = Buzz(config), retained.Buzz(config)
    view, n_max = retained.random_view(seed, 50), config.n_min + room
    kept = policy.keep(view, n_max)
    paper.evict(view, n_max)
    policy.truncate(n)
    view = edited(view, kept, n, 60, seed)
    sink = view.positions[: config.sink]
    paper.old = [p for p in paper.old if p < n and p not in sink]
    assert policy.keep(view, n_max).tolist() == paper.evict(view, n_max)


@given(seeds, ends, st.integers(1, 40), st.integers(1, 4), st.integers(6, 110))
def test_latem_after_an_edit(seed: int, end: tuple[int, int], room: int, k_m: int, n: int) -> None:
    """Marks from there on are forgotten: other tokens take their positions."""
    config = LatemConfig(end[0], end[1], k_m, 0.3)
    policy, paper = Latem(config), retained.Latem(config)
    view, n_max = retained.random_view(seed, 50), config.n_min + room
    kept = policy.keep(view, n_max)
    paper.evict(view, n_max)
    policy.truncate(n)
    assert view.messages is not None
    span = slice(config.sink, view.n - config.window)
    seen = view.messages[span][view.positions[span] < n].tolist()
    paper.marked_m &= set(range(max(seen, default=-1) + 1))
    paper.marked_t = {
        m: {p for p in marked if p < n} for m, marked in paper.marked_t.items() if m in seen
    }
    paper.totals = {p: total for p, total in paper.totals.items() if p < n}
    paper.pred_count_t = {m: count for m, count in paper.pred_count_t.items() if m in seen}
    view = edited(view, kept, n, 60, seed)
    assert policy.keep(view, n_max).tolist() == paper.evict(view, n_max)


def test_parameter_theorem() -> None:
    """With T / w as the theorem says, the recurrence of the old tokens levels off near w."""
    for stride in range(3, 13):
        window = 400
        threshold = threshold_per_window(stride) * window
        old = threshold / stride
        for _ in range(500):
            old = math.floor(old / ((stride + 1) // 2)) + math.floor((threshold - old) / stride)
        assert abs(old - window) <= 2 * stride


@given(st.integers(6, 5000), st.integers(3, 12))
def test_buzz_fills_its_budget(budget: int, stride: int) -> None:
    assert BuzzConfig.for_budget(budget, stride).budget == budget


@given(st.lists(st.integers(1, 50), max_size=9), st.integers(0, 300))
def test_shares_are_fair(sizes: list[int], room: int) -> None:
    dealt = shares(np.array(sizes, np.int64), room)
    assert dealt.sum() == min(room, sum(sizes))
    assert (dealt <= sizes).all()
    hungry = dealt < np.array(sizes, np.int64)
    if hungry.any():
        assert dealt.max() - dealt[hungry].min() <= 1


@pytest.mark.parametrize("name", NAMES)
def test_bad_views(name: str) -> None:
    policy = open_retention(retention_config(name, 40))
    view = retained.random_view(0, 50)
    with pytest.raises(ValueError, match="sink and window alone are"):
        policy.keep(view, policy.config.n_min - 1)
    with pytest.raises(ValueError, match="ascending"):
        policy.keep(replace(view, positions=view.positions[::-1]), 40)
    with pytest.raises(ValueError, match=r"in \[0, 3\)"):
        policy.keep(replace(view, n_seen=3), 40)
    for signal in policy.signals:
        missing: dict[str, Any] = {signal.value: None}
        with pytest.raises(ValueError, match="missing"):
            policy.keep(replace(view, **missing), 40)
        short: dict[str, Any] = {signal.value: view.positions[:9]}
        with pytest.raises(ValueError, match="entries for 50|must be"):
            policy.keep(replace(view, **short), 40)


@pytest.mark.parametrize("name", NAMES)
def test_budgets_that_are_too_small(name: str) -> None:
    with pytest.raises(ValueError, match="too small"):
        retention_config(name, 4)
    with pytest.raises(ValueError, match="no retention policy 'lru'"):
        retention_config("lru", 100)
