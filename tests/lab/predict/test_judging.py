"""Training the graph model, words as vectors, and how predictors are scored."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from random_workflows import workflows

from lab.predict.accuracy import concatenate, score_forecasts
from lab.predict.baselines import score_learning
from lab.predict.runs import FinishedRun, folds, split
from lab.predict.words import hash_text
from towerd.policy.predict.base import END, N_STEPS, Forecast
from towerd.policy.predict.graph import GraphPredictor
from towerd.policy.predict.markov import Markov, learn
from towerd.policy.predict.steps import N_TEXT


def test_numpy_equals_torch_and_it_learns() -> None:
    """The forward passes agree to rounding, and training beats what names alone can tell."""
    torch = pytest.importorskip("torch")
    from lab.predict import train

    runs = workflows(120)
    learned, held = split(runs, 0.3, 1)
    losses: list[float] = []
    weights = train.train(learned, epochs=12, progress=lambda *each: losses.append(each[2]))
    assert min(losses) < losses[0]
    graph = GraphPredictor(weights)
    numbers = {name: 1 + i for i, name in enumerate(weights.agents)}
    examples = train.examples_of(held[:8], numbers)
    tensors = {name: torch.from_numpy(array) for name, array in weights.arrays.items()}
    with torch.no_grad():
        want = train.logits_of(tensors, examples.paths, examples.texts).numpy()
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
    by_graph = score_forecasts(
        held,
        lambda r, i: [
            dict(zip(names, row[1:].tolist(), strict=True))
            for row in graph.chances(r.steps[: i + 1], r.meanings[i])
        ],
    )
    by_name = score_forecasts(held, lambda r, i: markov.forecast(r.steps[: i + 1]))
    assert by_graph.accuracy[0] > by_name.accuracy[0] + 0.05
    assert by_graph.calibration_error < 0.2


def test_groups_stay_together() -> None:
    """Runs of one task are never on both sides, and no side is empty."""
    runs = workflows(30)
    rest, held = split(runs, 0.3, 5)
    assert len(rest) + len(held) == 30
    assert not {run.group for run in rest} & {run.group for run in held}
    one = [FinishedRun(("a",), group="same") for _ in range(4)]
    assert all(split(one, 0.3, 0))
    parts = folds(runs, 5, 0)
    assert sorted(Counter(parts).values()) == [6] * 5
    assert len({(run.group, part) for run, part in zip(runs, parts, strict=True)}) == 15
    assert sorted(folds(one, 2, 0)) == [0, 0, 1, 1]


def test_accuracy_by_hand() -> None:
    """Counted at every place where something came, END too; no forecast is a wrong one."""
    runs = [FinishedRun(("a", "b"))]
    found = score_forecasts(runs, lambda run, i: [{"b": 0.8, END: 0.2}, {END: 1.0}, {END: 1.0}])
    assert found.accuracy == (0.5, 1.0, 0.0)
    assert len(found.sure) == 2
    assert found.calibration_error == pytest.approx(0.3)
    assert score_forecasts(runs, lambda run, i: ()).accuracy[0] == 0.0


def test_counts_that_go_on_learn_from_what_is_tested() -> None:
    """Each step counts once it was taken, and never before."""
    runs = [FinishedRun(tuple("xyxyxy"))]
    found = score_learning([FinishedRun(("a",))], runs)
    assert found.right[:, 0].tolist() == [0, 0, 1, 1, 1, 0]
    assert found.log_loss > 0.5


def test_the_error_of_a_lead_counts_tasks() -> None:
    """Runs of one task that agree are one draw: as often as it is repeated, the error stays; it
    is that of a mean over independent tasks."""
    rng = random.Random(1)
    runs = [FinishedRun(("a",), group=f"task {i}") for i in range(200) for _ in range(4)]
    luck = {f"task {i}": rng.random() < 0.3 for i in range(200)}

    def says(run: FinishedRun, i: int) -> Forecast:
        return [{END: 1.0} if luck[run.group] else {"a": 1.0}] * N_STEPS

    never = score_forecasts(runs, lambda run, i: [{"a": 1.0}] * N_STEPS)
    (lead, error), *_ = score_forecasts(runs, says).ahead_of(never)
    share = sum(luck.values()) / 200
    assert lead == pytest.approx(share)
    assert error == pytest.approx(math.sqrt(share * (1 - share) / 200))
    halves = [score_forecasts(runs[:400], says), score_forecasts(runs[400:], says)]
    assert concatenate(halves).ahead_of(never)[0] == pytest.approx((lead, error))


def test_hashed_text() -> None:
    """The same words, the same cells, whatever the case; nothing for no words."""
    x = hash_text("Cancel the flight")
    assert x.shape == (N_TEXT,)
    assert np.linalg.norm(x) == pytest.approx(1.0)
    assert np.array_equal(x, hash_text("the FLIGHT, cancel!"))
    assert not hash_text(" ... ").any()
    assert abs(float(x @ hash_text("weather in Oslo"))) < 0.5
