"""Predictors: Markov against counting, the graph model against torch, fallback, next use."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workflows import random_weights

from lab.policies.latem import InterArrival
from towerd.policy.predict.base import END, N_STEPS, Forecast, NoPrediction, best
from towerd.policy.predict.fallback import Fallback
from towerd.policy.predict.markov import Markov, learn

PATHS = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=7), min_size=1, max_size=8)


@settings(deadline=None)
@given(PATHS, st.lists(st.sampled_from("abcd"), min_size=1, max_size=4))
def test_markov_1_counts(runs: list[list[str]], path: list[str]) -> None:
    """Each distance on its own: Witten-Bell over what followed the last step, and anything."""
    markov = Markov(1)
    for run in runs:
        learn(markov, run)
    forecast = markov.forecast(path)
    for ahead, step in enumerate(forecast, 1):
        every, after = Counter[str](), Counter[str]()
        for run in runs:
            names = [*run, END]
            for i in range(len(names) - ahead):
                every[names[i + ahead]] += 1
                after[names[i + ahead]] += names[i] == path[-1]
        after = +after
        weight = after.total() / (after.total() + len(after)) if after else 0.0
        for name in every:
            want = (1 - weight) * every[name] / every.total()
            want += weight * after[name] / after.total() if after else 0.0
            assert step[name] == pytest.approx(want)
        assert not step or sum(step.values()) == pytest.approx(1.0)


def test_longer_contexts_count() -> None:
    """Markov 2 predicts what depends on two steps of context."""
    runs = ["abac", "bbbd"] * 20
    one, two = Markov(1), Markov(2)
    for run in runs:
        learn(one, run)
        learn(two, run)
    assert best(two.forecast(["b", "a"])[0]) == "c"
    assert two.forecast(["b", "a"])[0]["c"] > one.forecast(["b", "a"])[0]["c"]
    assert best(two.forecast(["a", "c"])[0]) == END
    assert Markov().forecast(["a"]) == ()
    with pytest.raises(ValueError, match="order"):
        Markov(0)


def test_markov_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contexts used longest ago are forgotten."""
    monkeypatch.setattr("towerd.policy.predict.markov.CONTEXTS_MAX", 200)
    markov, unseen = Markov(3), ["x"]
    for i in range(100):
        markov.observe([f"{i}a", f"{i}b"])
    assert len(markov.learned()["contexts"]) <= 200
    assert best(markov.forecast(["99a"])[0]) == "99b"
    for i in range(100, 400):
        markov.observe([f"{i}a", f"{i}b"])
    assert len(markov.learned()["contexts"]) <= 200
    assert best(markov.forecast(["399a"])[0]) == "399b"
    assert markov.forecast(["99a"]) == markov.forecast(unseen)


class Says:
    """A predictor with a constant forecast."""

    def __init__(self, name: str) -> None:
        self.name = name

    def forecast(self, path: object) -> Forecast:
        return [{self.name: 1.0}] * N_STEPS

    def observe(self, path: object) -> None:
        pass


def test_fallback_follows_who_is_right() -> None:
    """The preferred one, then the next, then none; and back."""
    first, second = Says("a"), Says("b")
    both = Fallback([first, second])

    def steps(name: str, n: int) -> object:
        for _ in range(n):
            both.forecast(["x"])
            both.observe(["x", name])
        return both.leader

    assert steps("a", 50) is first
    assert best(both.forecast(["x"])[0]) == "a"
    assert steps("b", 300) is second
    assert isinstance(steps("c", 600), NoPrediction)
    assert both.forecast(["x"]) == ()
    assert steps("a", 600) is first
    assert both.live_accuracy[0] > 0.9 > both.live_accuracy[1]


def test_graph_weights_are_about_350k() -> None:
    """Few parameters for the paper's handful of agents, and not many times that for many agents."""
    arrays = random_weights(("a",) * 30).arrays
    n = sum(array.size for name, array in arrays.items() if name != "transitions")
    assert 250_000 < n < 400_000


def test_inter_arrival() -> None:
    """Last use and usual gap; overdue ones wait longer; unknown ones never return."""
    when = InterArrival()
    for now in (0.0, 10.0, 20.0):
        when.observe("a", now)
    when.observe("b", 21.0)
    assert when("a") == pytest.approx(30.0)
    assert when("b") == pytest.approx(31.0)
    assert when("c") == math.inf
    when.observe("d", 50.0)
    assert when("a") == pytest.approx(80.0)
