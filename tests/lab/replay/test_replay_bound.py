"""The replayer and Belady's bound, against brute force."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.policies.factory import NAMES, make_policy
from lab.replay.belady import belady_hits
from lab.replay.interleave import interleave
from lab.replay.simulate import outcome_of, replay
from lab.replay.trace import Call, Trace, TraceError
from lab.replay.tree import TreeBuilder
from towerd.policy.base import LRU, Key


def trace_of(prompts: list[list[int]], blocks_max: int = 1, step_s: float = 1.0) -> Trace:
    """Prompts over a small alphabet: a block is its whole prefix."""
    tree = TreeBuilder()
    numbers: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        prefixes = [tuple(prompt[: i + 1]) for i in range(len(prompt))]
        tree.add(None, 0, [numbers.setdefault(p, len(numbers)) for p in prefixes])
    parents, lengths, paths = tree.finish(blocks_max)
    calls = [
        Call(i * step_s, path, 10 * len(prompt), i, ("tool_use", "")[i % 2], ends=path[-1:])
        for i, (path, prompt) in enumerate(zip(paths, prompts, strict=True))
    ]
    return Trace("t", 10, parents, lengths, calls)


def best_hits(trace: Trace, capacity: int) -> int:
    """The most blocks that any cache of unit segments can find: every subset is tried."""
    paths = [frozenset(call.path) for call in trace.calls]

    @cache
    def best(i: int, held: frozenset[int]) -> int:
        if i == len(paths):
            return 0
        pool = sorted(held | paths[i])
        keeps = combinations(pool, min(capacity, len(pool)))
        return len(held & paths[i]) + max(best(i + 1, frozenset(keep)) for keep in keeps)

    return best(0, frozenset())


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=40)
FEW_PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=7)


@settings(deadline=None, max_examples=60)
@given(FEW_PROMPTS, st.integers(1, 5))
def test_belady_equals_brute_force(prompts: list[list[int]], capacity: int) -> None:
    """On unit sizes, with no rule about the tree at all for the brute force."""
    trace = trace_of(prompts)
    assert sum(belady_hits(trace, capacity)) == best_hits(trace, capacity)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(PROMPTS, st.integers(0, 20), st.integers(1, 4), st.booleans())
def test_belady_is_never_beaten(
    name: str, prompts: list[list[int]], capacity: int, blocks_max: int, hints: bool
) -> None:
    """By no policy, at no capacity, with segments of any size."""
    trace = trace_of(prompts, blocks_max)
    outcome = replay(trace, make_policy(name, trace), capacity, end_hints=hints)
    assert sum(outcome.hits) <= sum(belady_hits(trace, capacity))


@given(PROMPTS)
def test_with_room_for_all_every_policy_is_optimal(prompts: list[list[int]]) -> None:
    trace = trace_of(prompts, 3)
    n = trace.n_distinct_blocks
    assert replay(trace, LRU(trace), n).hits == belady_hits(trace, n)
    assert sum(belady_hits(trace, 0)) == 0


class Checked(LRU):
    """LRU that never sees more than the capacity once the replayer is done with a request."""

    capacity = 5

    def access(self, key: Key, now: float) -> None:
        assert self.nbytes <= self.capacity
        super().access(key, now)


@given(PROMPTS)
def test_the_cache_keeps_its_capacity(prompts: list[list[int]]) -> None:
    """And Belady's outcome counts as the replayer's does."""
    trace = trace_of(prompts, 2)
    outcome = replay(trace, Checked(trace), Checked.capacity)
    again = outcome_of(trace, outcome.hits)
    assert again == outcome
    n_blocks = sum(len(prompt) for prompt in prompts)
    assert outcome.n_moved_blocks == n_blocks - sum(outcome.hits)
    assert outcome.n_prefilled_tokens == 10 * outcome.n_moved_blocks
    assert outcome.bytes_moved(3) == 30 * outcome.n_moved_blocks
    assert outcome.hit_rate == pytest.approx(sum(outcome.hits) / n_blocks)


def test_segments_are_cut_at_the_maximum() -> None:
    trace = trace_of([[0] * 7, [0] * 7 + [1]], 3)
    assert trace.n_blocks == [3, 3, 1, 1]
    assert trace.calls[1].path == (0, 1, 2, 3)


def test_interleave_keeps_sessions_in_order() -> None:
    """Every call once; a session's calls in order and at their distances but for long pauses."""
    trace = trace_of([[i % 3, i] for i in range(20)])
    trace.calls = [Call(50.0 * (i % 5), c.path, 20, i // 5) for i, c in enumerate(trace.calls)]
    woven = interleave(trace, 3, seed=1, idle_s_max=40.0)
    assert woven.name == "t-3"
    assert sorted(c.path for c in woven.calls) == sorted(c.path for c in trace.calls)
    times = [call.time_s for call in woven.calls]
    assert times == sorted(times)
    for session in range(4):
        mine = [call.time_s for call in woven.calls if call.session == session]
        assert [b - a for a, b in zip(mine, mine[1:], strict=False)] == pytest.approx([40.0] * 4)
    assert woven.calls != interleave(trace, 3, seed=2).calls
    with pytest.raises(TraceError):
        interleave(trace, 0, 0)
