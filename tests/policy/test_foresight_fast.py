"""What makes decisions quick does not change them: the same victims without any of it."""

from __future__ import annotations

import heapq

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.policy.base import Key
from towerd.policy.foresight import Forecast, Foresight
from towerd.policy.predict.hazard import HazardNet, Served
from towerd.policy.predict.returns import EDGES_S, N_BINS, bin_of
from towerd.policy.tree import Entry
from towerd.policy.visits import Visit, Visits


def no_preparation(entries: list[Entry]) -> None:
    """Every visit is judged when its index is asked for."""


class PlainVisits(Visits):
    """Looks every index up."""

    def index(self, visit: Visit, now: float) -> float:
        if visit.table is None:
            self.judge([visit])
        assert visit.table is not None
        since_s = visit.start_s if visit.answered_s is None else visit.answered_s
        return visit.table[bin_of(now - since_s)]


def rank_leaves_one_by_one(policy: Forecast) -> None:
    for key in sorted(policy._unranked):
        entry = policy._entries.get(key)
        if entry is not None and key not in policy._n_children:
            entry.ranked = policy._rank(entry)
            heapq.heappush(policy._heap, (entry.ranked, key))
    policy._unranked.clear()


class PlainForecast(Forecast):
    _before_ranks = staticmethod(no_preparation)
    _rank_leaves = rank_leaves_one_by_one


class PlainForesight(Foresight):
    """Foresight as it reads: no judging ahead, no remembered index, one push for each leaf."""

    _before_ranks = staticmethod(no_preparation)
    _rank_leaves = rank_leaves_one_by_one

    def __init__(self) -> None:
        super().__init__()
        self.visits = PlainVisits()
        self._shadow = self._rival()

    def _rival(self) -> Forecast:
        return PlainForecast(self.visits, self.predictor)

    def rerank(self, now: float) -> None:
        self._tick(now)
        self._heap.clear()
        self._unranked.update(key for key in self._entries if key not in self._n_children)


def live(policy: Foresight, seed: int, room: int, n: int) -> list[list[Key]]:
    """Conversations over two bases that go on, end and begin at random; the victims of each
    request, forecasts leading from the 200th on. Sizes and times have no ties."""
    rng = np.random.default_rng(seed)
    victims: list[list[Key]] = []
    tips: list[Key] = []
    now, key = 0.0, 0
    for base in (0, 1):
        policy.insert(base, 40 + base, now, None)
    for i in range(n):
        now += float(rng.exponential(4.0))
        old = int(rng.integers(len(tips) + 1))
        parent = tips.pop(old) if old < len(tips) else int(rng.integers(2))
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
            tips.append(key)
        if i == 200:
            policy.trusts = True
        found = policy.victims(policy.nbytes - room, lambda key: key > 1)
        for each in found:
            policy.remove(each)
        victims.append(found)
    return victims


@settings(deadline=None, max_examples=2)
@given(st.integers(0, 1000))
def test_the_same_victims(seed: int) -> None:
    assert live(Foresight(), seed, 9000, 400) == live(PlainForesight(), seed, 9000, 400)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 5))
def test_what_is_served_is_what_the_network_says(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    net = HazardNet(3, N_BINS)
    for weights in net.arrays.values():
        weights += rng.normal(0.0, 3.0, weights.shape)
    curves = rng.uniform(0.0, 1.0, (4, N_BINS)) * rng.integers(0, 2, (4, N_BINS))
    x, of = rng.normal(size=(n, 3)), rng.integers(0, 4, n).tolist()
    assert np.allclose(Served(net, curves)(x, of), net.chances(x, curves[of]), rtol=1e-9)


def test_an_index_is_that_of_the_table_at_any_time() -> None:
    """Forth and back, at the edges of bins, before and after the answer."""
    visits, visit = Visits(), Visit(100.0)
    visit.judge([float(b) for b in range(N_BINS)])
    for edge in (*EDGES_S, *reversed(EDGES_S)):
        for idle_s in (edge, edge * (1 + 1e-9) + 1e-9, edge * (1 - 1e-9) - 1e-9, edge - 200.0):
            now = visit.since_s + idle_s
            assert visits.index(visit, now) == bin_of(now - visit.since_s)
    visit.judge([7.0] * N_BINS)
    assert visits.index(visit, 1e9) == 7.0
