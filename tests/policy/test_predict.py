"""Predictors: Markov against counting, the graph model against torch, fall-back, judging, next use."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.policy.predict.accuracy import judge, together
from towerd.policy.predict.base import END, N_STEPS, Forecast, NoPrediction, best
from towerd.policy.predict.fallback import Fallback
from towerd.policy.predict.features import N_TEXT, hash_text
from towerd.policy.predict.graph import GraphPredictor, GraphWeights, shapes
from towerd.policy.predict.markov import CONTEXTS_MAX, Markov, learn
from towerd.policy.predict.next_use import AttentionMass, InterArrival
from towerd.policy.predict.runs import Run, folds, split

PATHS = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=7), min_size=1, max_size=8)


def random_weights(agents: tuple[str, ...], seed: int = 0) -> GraphWeights:
    rng = np.random.default_rng(seed)
    arrays = {
        name: (0.1 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes(1 + len(agents)).items()
    }
    arrays["temperature"] = np.array([0.7, 1.0, 1.5], np.float32)
    arrays["transitions"] = np.abs(arrays["transitions"])
    return GraphWeights(agents, arrays)


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
    """What only two steps of context tell, Markov 2 knows."""
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


def test_markov_memory_is_bounded() -> None:
    markov = Markov(3)
    for i in range(CONTEXTS_MAX // 8):
        markov.observe([f"{i}a", f"{i}b", f"{i}c", f"{i}d"])
    assert len(markov._counts) <= CONTEXTS_MAX


class Says:
    """Always the same."""

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
    """At the paper's handful of agents, and not many times that at many."""
    assert 250_000 < random_weights(("a",) * 30).n_parameters < 400_000


def workflows(n: int) -> list[Run]:
    """Where it goes on depends on the first step and on what was said."""
    rng, runs = random.Random(0), []
    for i in range(n):
        word = rng.choice(["refund", "cancel"])
        first = rng.choice(["plan", "ask"])
        steps = (first, "think", "pay" if word == "refund" else "stop", "done" * (first == "ask"))
        names = tuple(name for name in steps if name)
        said = [hash_text(f"please {word} it"), *[hash_text(word)] * (len(names) - 1)]
        runs.append(Run(names, tuple(said), f"task {i // 2}"))
    return runs


def test_numpy_equals_torch_and_it_learns() -> None:
    """The forward passes agree to rounding, and training beats what names alone can tell."""
    torch = pytest.importorskip("torch")
    from towerd.policy.predict import train

    runs = workflows(120)
    learned, held = split(runs, 0.3, 1)
    losses: list[float] = []
    weights = train.train(learned, epochs=12, progress=lambda *each: losses.append(each[2]))
    assert min(losses) < losses[0]
    graph = GraphPredictor(weights)
    numbers = {name: 1 + i for i, name in enumerate(weights.agents)}
    examples = train._examples(held[:8], numbers)
    tensors = {name: torch.from_numpy(array) for name, array in weights.arrays.items()}
    with torch.no_grad():
        want = train._logits(tensors, examples.paths, examples.texts).numpy()
    row = 0
    for run in held[:8]:
        for i in range(len(run.steps)):
            codes = [numbers.get(name, 0) for name in run.steps[: i + 1]]
            assert np.allclose(graph.logits(codes, run.meanings[i]), want[row], atol=2e-4)
            row += 1
    markov = Markov(3)
    for run in learned:
        learn(markov, run.steps)
    names = (*weights.agents, END)
    by_graph = judge(
        held,
        lambda r, i: [
            dict(zip(names, row[1:].tolist(), strict=True))
            for row in graph.chances(r.steps[: i + 1], r.meanings[i])
        ],
    )
    by_name = judge(held, lambda r, i: markov.forecast(r.steps[: i + 1]))
    assert by_graph.accuracy[0] > by_name.accuracy[0] + 0.05
    assert by_graph.calibration_error < 0.2


def test_groups_stay_together() -> None:
    """Runs of one task are never on both sides, and no side is empty."""
    runs = workflows(30)
    rest, held = split(runs, 0.3, 5)
    assert len(rest) + len(held) == 30
    assert not {run.group for run in rest} & {run.group for run in held}
    one = [Run(("a",), group="same") for _ in range(4)]
    assert all(split(one, 0.3, 0))
    parts = folds(runs, 5, 0)
    assert sorted(Counter(parts).values()) == [6] * 5
    assert len({(run.group, part) for run, part in zip(runs, parts, strict=True)}) == 15
    assert sorted(folds(one, 2, 0)) == [0, 0, 1, 1]


def test_accuracy_by_hand() -> None:
    """Counted at every place where something came, END too; no forecast is a wrong one."""
    runs = [Run(("a", "b"))]
    found = judge(runs, lambda run, i: [{"b": 0.8, END: 0.2}, {END: 1.0}, {END: 1.0}])
    assert found.accuracy == (0.5, 1.0, 0.0)
    assert len(found.sure) == 2
    assert found.calibration_error == pytest.approx(0.3)
    assert judge(runs, lambda run, i: ()).accuracy[0] == 0.0


def test_the_error_of_a_lead_counts_tasks() -> None:
    """Runs of one task that agree are one draw: as often as it is repeated, the error stays; it
    is that of a mean over independent tasks."""
    rng = random.Random(1)
    runs = [Run(("a",), group=f"task {i}") for i in range(200) for _ in range(4)]
    luck = {f"task {i}": rng.random() < 0.3 for i in range(200)}

    def says(run: Run, i: int) -> Forecast:
        return [{END: 1.0} if luck[run.group] else {"a": 1.0}] * N_STEPS

    never = judge(runs, lambda run, i: [{"a": 1.0}] * N_STEPS)
    (lead, error), *_ = judge(runs, says).ahead_of(never)
    share = sum(luck.values()) / 200
    assert lead == pytest.approx(share)
    assert error == pytest.approx(math.sqrt(share * (1 - share) / 200))
    halves = [judge(runs[:400], says), judge(runs[400:], says)]
    assert together(halves).ahead_of(never)[0] == pytest.approx((lead, error))


def test_hashed_text() -> None:
    """The same words, the same cells, whatever the case; nothing for no words."""
    x = hash_text("Cancel the flight")
    assert x.shape == (N_TEXT,)
    assert np.linalg.norm(x) == pytest.approx(1.0)
    assert np.array_equal(x, hash_text("the FLIGHT, cancel!"))
    assert not hash_text(" ... ").any()
    assert abs(float(x @ hash_text("weather in Oslo"))) < 0.5


def test_inter_arrival() -> None:
    """Last use and usual gap; overdue ones wait longer; unknown ones are never back."""
    when = InterArrival()
    for now in (0.0, 10.0, 20.0):
        when.observe("a", now)
    when.observe("b", 21.0)
    assert when("a") == pytest.approx(30.0)
    assert when("b") == pytest.approx(31.0)
    assert when("c") == math.inf
    when.observe("d", 50.0)
    assert when("a") == pytest.approx(80.0)


def test_attention_mass() -> None:
    """More attention, sooner; a message has that of its tokens; old attention fades."""
    mass = AttentionMass(0.5)
    mass.observe({(1, 0): 0.6, (1, 1): 0.2, (2, 0): 0.2}, 5.0)
    assert mass((1, 0)) < mass((1, 1)) == mass((2, 0)) == pytest.approx(10.0)
    assert mass(1) == pytest.approx(5.0 + 1 / 0.8)
    assert mass(3) == math.inf
    for now in range(6, 12):
        mass.observe({(2, 0): 1.0}, float(now))
    assert mass(2) < mass(1)
    with pytest.raises(ValueError, match="memory"):
        AttentionMass(0.0)
