"""The optimizations do not change decisions: the victims are the same without them."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from dataclasses import replace
from math import log, log1p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import planted

from lab.replay.load import load
from lab.replay.simulate import replay
from lab.replay.trace import Trace
from towerd.kernels.hazard import chances
from towerd.policy.base import Key
from towerd.policy.foresight import Foresight, ReturnRanking
from towerd.policy.predict.hazard import HazardNet
from towerd.policy.predict.returns import EDGES_S, N_BINS, bin_of
from towerd.policy.visits import STOPS_MAX, Visit, Visits

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"


class PlainRanking(ReturnRanking):
    """Without optimizations: no batches, no cached ranks, one push for each leaf."""

    def _rank_leaves(self) -> None:
        """Every rank from `_rank`, which scores a visit when it needs its index."""
        if self._is_unranked:
            self._heap.clear()
        for key in sorted(self._entries if self._is_unranked else self._unranked):
            entry = self._entries.get(key)
            if entry is not None and self._is_leaf(key):
                entry.ranked = self._rank(entry)
                heapq.heappush(self._heap, (entry.ranked, key))
        self._is_unranked = False
        self._unranked.clear()


class PlainForesight(Foresight, PlainRanking):
    """Foresight over it, and so is its shadow."""

    def _forecast_shadow(self) -> ReturnRanking:
        return PlainRanking(self.tree, self.visits, self.predictor)


def live(policy: Any, seed: int, room: int, n: int) -> list[list[Key]]:
    """Conversations over two bases that continue, end and begin at random; the victims of each
    request, forecasts leading from the 200th on. Sizes and times have no ties."""
    rng = np.random.default_rng(seed)
    victims: list[list[Key]] = []
    ends: list[Key] = []
    now, key = 0.0, 0
    for base in (0, 1):
        policy.insert(base, 40 + base, now, None)
    for i in range(n):
        now += float(rng.exponential(4.0))
        old = int(rng.integers(len(ends) + 1))
        parent = ends.pop(old) if old < len(ends) else int(rng.integers(2))
        key += 2
        if parent in policy:
            policy.access(parent, now)
        if parent in policy and parent > 1 and rng.random() < 0.2:
            policy.split(parent, key + 1, 1, now)
        policy.insert(key, int(rng.integers(10, 1000)), now, parent if parent in policy else None)
        now += float(rng.exponential(2.0))
        policy.answered(key, now, str(rng.choice(["tool_use", "end_turn"])))
        if rng.random() < 0.2:
            policy.ended(key, now)
        else:
            ends.append(key)
        if i == 200:
            policy.trusts = True
        found = policy.victims(policy.nbytes - room, lambda key: key > 1)
        for each in found:
            policy.remove(each)
        policy.check_integrity()
        victims.append(found)
    return victims


@settings(deadline=None, max_examples=2)
@given(st.integers(0, 1000))
def test_the_same_victims(seed: int) -> None:
    assert live(planted(Foresight), seed, 9000, 400) == live(
        planted(PlainForesight), seed, 9000, 400
    )


def of_trace(policy: Foresight, trace: Trace) -> list[list[Key]]:
    """The victims of a replay that uses forecasts from the beginning."""
    found: list[list[Key]] = []
    choose = policy.victims

    def victims(
        bytes_needed: int,
        is_evictable: Callable[[Key], bool],
        frees: Callable[[Key], int] | None = None,
    ) -> list[Key]:
        found.append(choose(bytes_needed, is_evictable, frees))
        return found[-1]

    policy.trusts = True
    policy.victims = victims  # type: ignore[method-assign]
    replay(trace, policy, trace.n_distinct_blocks // 20)
    return found


@pytest.mark.skipif(not TRACES.exists(), reason="the shared traces are not here")
def test_the_same_victims_of_a_recorded_trace() -> None:
    trace = load(TRACES / "mooncake_conversation.jsonl.zst", 16384)
    part = replace(trace, calls=trace.calls[:1200])
    found = of_trace(Foresight(part), part)
    assert len(found) > 100
    assert found == of_trace(PlainForesight(part), part)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 5))
def test_what_is_served_is_what_the_network_says(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    net = HazardNet(3, N_BINS)
    for weights in net.arrays.values():
        weights += rng.normal(0.0, 3.0, weights.shape)
    curves = rng.uniform(0.0, 1.0, (4, N_BINS)) * rng.integers(0, 2, (4, N_BINS))
    x, of = rng.normal(size=(n, 3)), rng.integers(0, 4, n).tolist()
    assert np.allclose(
        chances(net.inference_weights(curves), x, of), net.chances(x, curves[of]), rtol=1e-9
    )


def test_a_rank_holds_no_longer_than_its_bin() -> None:
    """At the edges of bins, by a clock with a large beginning, and when the table changes."""
    policy, start_s = planted(Foresight), 1.7e9 + 1 / 3
    now = start_s
    policy.insert(1, 10, start_s, None)
    policy.trusts = True
    visit = policy.visits.current
    visit.table = array("d", range(N_BINS))
    for edge in EDGES_S:
        for idle_s in (edge - 1e-6, edge, edge + 1e-6):
            now = max(start_s, start_s + idle_s)
            policy.rerank(now)
            assert policy.explain(1, now)["score"] == bin_of(now - start_s)
    visit.table = array("d", [7.0] * N_BINS)
    policy.rerank(now)
    assert policy.explain(1, now)["score"] == 7.0


SOME_S = st.none() | st.floats(0.0, 1e5)
STOPS = ["tool_use", "end_turn", ""]


@settings(deadline=None, max_examples=50)
@given(
    SOME_S,
    SOME_S,
    SOME_S,
    st.lists(st.integers(0, 10**7), min_size=3, max_size=3),
    st.integers(0, 12),
    st.sampled_from(STOPS),
    st.sampled_from([None, *STOPS]),
)
def test_features_as_they_read(
    service_s: float | None,
    gap_s: float | None,
    gap_before_s: float | None,
    sizes: list[int],
    turn: int,
    stop: str,
    before: str | None,
) -> None:
    """One after the other, to the last bit."""
    visits, visit = Visits(), Visit(0.0)
    visits.stops, visits.mean_nbytes = STOPS[:2], 3000.0
    visit.answered_s, visit.gap_s, visit.gap_before_s = service_s, gap_s, gap_before_s
    visit.nbytes, visit.new_before, visit.turn = max(sizes), sizes[1], turn
    visit.base_nbytes, visit.stop, visit.before = min(sizes), stop, before
    for asked in (False, True):
        is_answered = service_s is not None and not asked
        ended = [0.0] * (2 * STOPS_MAX)
        for i, name in enumerate(visits.stops):
            ended[i], ended[STOPS_MAX + i] = (
                float(is_answered and stop == name),
                float(before == name),
            )
        lengths = (visit.nbytes, visit.nbytes - visit.base_nbytes, visit.new_before)
        assert visits.features(visit, asked=asked).tolist() == [
            *ended,
            1.0,
            is_answered,
            log1p(service_s or 0.0) / 2 if is_answered else 0.0,
            gap_s is not None,
            log1p(gap_s or 0.0) / 2,
            gap_before_s is not None,
            log1p(gap_before_s or 0.0) / 2,
            *(0.5 * log(max(1e-3, min(1e3, nbytes / 3000.0))) for nbytes in lengths),
            turn == 0,
            turn == 1,
            min(turn, 8) / 8,
        ]
