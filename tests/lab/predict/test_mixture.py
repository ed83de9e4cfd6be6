"""The mixture of predictors: every part against an oracle, held-out data that stays held out, and
its file."""

from __future__ import annotations

import dataclasses
import random
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workflows import random_weights, workflows

from lab.predict.accuracy import score_forecasts
from lab.predict.baselines import score_all, table
from lab.predict.runs import FinishedRun, remember, split
from lab.predict.train_mixture import (
    left_out,
    n_parameters,
    save,
    scores_by_names,
    stacked,
    train_mixture,
    training_set,
)
from lab.predict.words import hash_text
from towerd.errors import ConfigError
from towerd.policy.predict.base import END, N_STEPS, best
from towerd.policy.predict.markov import Markov, learn
from towerd.policy.predict.mixture import GraphMean, Mixture, MixtureWeights
from towerd.policy.predict.mixture_file import load
from towerd.policy.predict.steps import (
    N_MARKOV,
    N_TEXT,
    PARTS,
    copied,
    counted,
    likeness,
    step,
    tally,
)

RUNS = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=7), min_size=1, max_size=8)


@cache
def small_mixture() -> MixtureWeights:
    """Trained on a few workflows, with graph models of random numbers."""
    graphs = (random_weights(("done", "pay")), random_weights(("ask", "plan", "think"), 1))
    return dataclasses.replace(train_mixture(workflows(12), None), graphs=graphs)


@settings(deadline=None)
@given(RUNS, st.lists(st.sampled_from("abc"), min_size=N_MARKOV, max_size=6))
def test_counts_are_those_of_markov(runs: list[list[str]], path: list[str]) -> None:
    names = sorted({name for run in runs for name in run})
    numbers = {name: i for i, name in enumerate(names)}
    steps = remember([FinishedRun(tuple(run)) for run in runs], numbers, len(names))
    every = tally(steps.outcomes, len(names) + 1)
    found, is_known = counted(step(path, ()), steps.keys, steps.outcomes, every)
    assert is_known == any(path[-1] in run for run in runs)
    for order, scores in enumerate(found, 1):
        markov = Markov(order)
        for run in runs:
            learn(markov, run)
        for ahead, want in enumerate(markov.forecast(path)):
            said = dict(zip([*names, END], scores[ahead].tolist(), strict=True))
            assert {n: p for n, p in said.items() if p} == pytest.approx(dict(want), abs=1e-6)


def test_likeness_by_definition() -> None:
    """One, one for each equal context, and the cosines of words, twice where names are equal; a
    step alone is like the others as it is in a row with them; and it is a kernel."""
    runs = [*workflows(6), FinishedRun(("ask", "think"))]
    numbers = {name: i for i, name in enumerate(sorted({n for r in runs for n in r.steps}))}
    steps = remember(runs, numbers, len(numbers))
    for words in (False, True):
        alike = likeness(steps, steps, words=words)
        for i in range(len(steps)):
            for j in range(len(steps)):
                equal = steps.keys[i] == steps.keys[j]
                want = 1.0 + equal.sum()
                if words:
                    cosines = [float(a[i] @ a[j]) for a in (steps.said, steps.talk)]
                    want += sum(3.0 * (c + c * c) for c in cosines) * (1 + equal[0])
                assert alike[i, j] == pytest.approx(want, rel=1e-3, abs=1e-3)
        assert np.linalg.eigvalsh(alike.astype(np.float64)).min() > -1e-3
        one = step(runs[0].steps[:2], runs[0].meanings[:2])
        assert np.allclose(likeness(one, steps, words=words), alike[1], atol=5e-3)


def test_votes_that_leave_a_group_out() -> None:
    """The closed form is what learning without the group gives."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((30, 5)).astype(np.float32)
    target = rng.standard_normal((30, 4)).astype(np.float32)
    groups = rng.integers(0, 6, 30)
    kernel, ridge = x @ x.T, 2.0 * np.eye(30, dtype=np.float32)
    inverse = np.linalg.inv(kernel + ridge).astype(np.float32)
    found = left_out(inverse, inverse @ target, target, groups)
    for group in range(6):
        out, rest = groups == group, groups != group
        votes = np.linalg.solve((kernel + ridge)[np.ix_(rest, rest)], target[rest])
        assert np.allclose(found[out], kernel[np.ix_(out, rest)] @ votes, atol=1e-3)


def test_no_part_has_seen_what_it_is_weighed_on() -> None:
    """The counts for a step are those of a mixture that was trained without its task."""
    runs = workflows(20)
    training = training_set(runs, 0)
    parts, is_known = scores_by_names(training)
    columns = {name: i for i, name in enumerate(training.agents)}
    for row in random.Random(0).sample(range(training.n_voters), 12):
        run, i = training.places[row]
        others = [each for each in runs if each.group != run.group]
        weights = train_mixture(others, None)
        without = Mixture(weights)
        n = len(training.agents) + 1
        found, known = without.parts(run.steps[: i + 1], (), columns, n)
        assert known == is_known[row]
        assert training.agents == weights.agents
        for name in ("markov1", "markov2", "markov3", "copy", "recent"):
            at = PARTS.index(name)
            assert np.allclose(parts[row, at], found[at], atol=1e-6)


def test_copied_by_hand() -> None:
    """What followed the last name before, later times counting more; and who acted of late."""
    copy, recent = copied(["a", "b", "a", "c", "a"], {"a": 0, "b": 1, "c": 3}, 4)
    b, c = 0.9**4, 0.9**2
    assert copy[0].tolist() == pytest.approx([0, b / (b + c + 1), 0, c / (b + c + 1)])
    assert copy[1].tolist() == pytest.approx([(b + c) / (b + c + 1), 0, 0, 0])
    assert copy[2].tolist() == pytest.approx([0, 0, 0, b / (b + 1)])
    weights = [1 + 0.9**2 + 0.9**4, 0.9**3, 0, 0.9]
    assert recent[2].tolist() == pytest.approx([w / sum(weights) for w in weights])


def test_stacked_against_all_weights() -> None:
    """No weights on a grid have a smaller squared error, with the pull to the prior."""
    rng = np.random.default_rng(5)
    outcomes = rng.integers(0, 3, 200).astype(np.int32)
    target = np.eye(3, dtype=np.float32)[outcomes]
    noise = rng.standard_normal((2, 200, 3)).astype(np.float32)
    good, bad = 0.6 * target + 0.2 * noise[0], 0.2 * noise[1]
    parts = np.stack([good, bad, -target], axis=1)
    prior = np.full(3, 1 / 3)

    def loss(w: Any) -> float:
        error = np.einsum("p,npc->nc", w, parts) - target
        return float((error**2).sum() + 10.0 * ((np.array(w) - prior) ** 2).sum())

    found = stacked(parts, outcomes, prior, 10.0)
    grid = np.arange(0.0, 2.0, 0.1)
    least = min(loss((a, b, c)) for a in grid for b in grid for c in (0.0, 0.1))
    assert loss(found) <= least + 1e-6
    assert found[0] > 1.0 > found[1]
    assert found[2] == 0.0


def test_forecasts_are_distributions(tmp_path: Path) -> None:
    """Of any path, through a file; names that training has not seen may come again."""
    weights = small_mixture()
    save(weights, tmp_path / "p.npz")
    again = load(tmp_path / "p.npz")
    assert again.agents == weights.agents
    assert n_parameters(again) == n_parameters(weights) > 0
    mixture, copy = Mixture(weights), Mixture(again)
    said = [hash_text("please refund it")]
    for path in (["ask"], ["nobody", "think"], ["nobody", "somebody"] * 80, ["\ud800"]):
        for meanings in ((), said * len(path)):
            forecast = mixture.forecast(path, meanings)
            assert forecast == copy.forecast(path, meanings)
            for each in forecast:
                assert set(each) == {*weights.agents, END, *path}
                assert sum(each.values()) == pytest.approx(1.0, abs=1e-4)
    assert mixture.forecast([]) == ()
    assert mixture.forecast(["ask"]) != mixture.forecast(["ask"], said)


def test_names_that_training_has_not_seen() -> None:
    """Where every workflow has agents of its own who take turns, so will new ones."""
    runs = [FinishedRun((f"a{i}", f"b{i}") * 6, group=f"{i}") for i in range(12)]
    mixture = Mixture(train_mixture(runs, None))
    for n in (3, 8, 40):
        forecast = mixture.forecast(["nobody", "somebody"] * n)
        assert [best(each) for each in forecast[:2]] == ["nobody", "somebody"]
        assert n < 8 or forecast[0]["nobody"] > 0.6


def test_it_beats_its_parts_on_what_it_has_not_seen() -> None:
    """Names alone as well as Markov, which needs no words there; with words far better, and as
    sure as it is right."""
    learned, held = split(workflows(160), 0.4, 1)
    weights = train_mixture(learned, None)
    rows = table(score_all(learned, held, weights))
    assert rows["mixture"]["s1"] > rows["markov3"]["s1"] + 0.05
    assert rows["mixture, names only"]["s1"] > rows["markov3"]["s1"] - 0.02
    assert rows["mixture"]["calibration_error"] < 0.1
    lead = rows["mixture - best markov"]
    assert lead["s1"] > 2 * lead["s1_error"] > 0.0
    assert "graph" not in rows


def test_graph_models_speak_of_what_they_have_not_seen() -> None:
    """Every one is trained without a part of the tasks, all tasks are in some part, and the
    forecasts that weights are learned from are its own."""
    runs = workflows(30)
    seen: list[set[str]] = []

    def train_graph(runs: Any, seed: int) -> Any:
        seen.append({run.group for run in runs})
        return random_weights(tuple(sorted({n for run in runs for n in run.steps})), seed)

    weights = train_mixture(runs, train_graph)
    every = {run.group for run in runs}
    missing = [every - groups for groups in seen]
    assert len(weights.graphs) == len(seen) == 3
    assert set.union(*missing) == every
    assert sum(map(len, missing)) == len(every)
    mean = GraphMean(weights.graphs, weights.agents).chances(["ask", "think"], None)
    assert mean.sum(1) == pytest.approx(1.0, abs=0.5)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_few_workflows(n: int) -> None:
    """Nothing to learn weights on is no reason to fail; one workflow is."""
    runs = [FinishedRun(("a", "b"), group="one task")] * n
    weights = train_mixture(runs, lambda runs, seed: random_weights(("a", "b"), seed))
    forecast = Mixture(weights).forecast(["a"])
    assert len(forecast) == N_STEPS
    with pytest.raises(ValueError, match="too few"):
        train_mixture(runs[:1], None)


@pytest.mark.parametrize(
    "damage",
    ["text", "format", "shape", "nan", "missing", "empty", "zip", "npy", "cut", "bits", "name",
     "words", "huge", "temperature", "pickle", "claim", "outcome", "negative", "floor", "voters",
     "ways", "twice", "stranger", "votes", "old"],
)  # fmt: skip
def test_bad_files(tmp_path: Path, damage: str) -> None:
    """One sentence each."""
    path = tmp_path / "p.npz"
    save(small_mixture(), path)
    with np.load(path) as found:
        arrays: dict[str, Any] = {name: found[name] for name in found.files}
    raw = path.read_bytes()
    change: Callable[[], Any] | None = {
        "format": lambda: arrays.update(format=np.array("other/9")),
        "old": lambda: arrays.update(format=np.array("towerd-predictor/1")),
        "shape": lambda: arrays.update({"graph 1 w1": arrays["graph 1 w1"][:, 1:]}),
        "nan": lambda: arrays["votes"].__setitem__((0, 0, 0), np.nan),
        "missing": lambda: arrays.pop("graph 0 w4"),
        "votes": lambda: arrays.pop("votes"),
        "words": lambda: arrays.update(keys=arrays["keys"].astype(np.str_)),
        "huge": lambda: arrays.update(votes=np.full(arrays["votes"].shape, 1e300)),
        "temperature": lambda: arrays["graph 0 temperature"].fill(0),
        "outcome": lambda: arrays["outcomes"].__setitem__((0, 0), 99),
        "negative": lambda: arrays["weights"].__setitem__((0, 0, 0, 0), -1),
        "floor": lambda: arrays["curve"].fill(0),
        "voters": lambda: arrays.update(keys=arrays["keys"][:3], outcomes=arrays["outcomes"][:3]),
        "ways": lambda: arrays.update(votes=arrays["votes"][:0]),
        "twice": lambda: arrays["agents"].__setitem__(0, arrays["agents"][1]),
        "stranger": lambda: arrays["graph 0 agents"].__setitem__(0, "who"),
        "name": lambda: arrays.update(agents=np.array(7)),
        "pickle": lambda: arrays.update(format=np.array([Unpickled()], object)),
    }.get(damage)
    if change is not None:
        change()
        np.savez(path, **arrays)
    else:
        damage_bytes(path, damage, raw)
    with pytest.raises(ConfigError, match=r"p\.npz is"):
        load(path)


def damage_bytes(path: Path, damage: str, raw: bytes) -> None:
    """Make it a file that `save` cannot have written."""
    if damage == "text":
        path.write_text("no weights")
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "zip":
        path.write_bytes(b"PK\x03\x04" + bytes(100))
    elif damage == "npy":
        with path.open("wb") as stream:
            np.save(stream, np.zeros(3))
    elif damage == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    elif damage == "bits":
        path.write_bytes(raw[:5000] + bytes([raw[5000] ^ 255]) + raw[5001:])
    elif damage == "claim":
        head = "{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,), }"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("w1.npy", b"\x93NUMPY\x01\x00v\x00" + head.ljust(117).encode() + b"\n")


class Unpickled:
    """Unpickling it runs its code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a file was unpickled",)


def test_words_have_their_size() -> None:
    """A step without words has none, and old words count less."""
    assert not step(["a"], ()).said.any()
    x, y = hash_text("refund"), hash_text("cancel")
    now = step(["a", "b"], (x, y))
    assert np.array_equal(now.said, y)
    assert np.linalg.norm(now.talk) == pytest.approx(1.0, abs=1e-5)
    assert now.talk @ y > now.talk @ x > 0.0
    assert now.talk.shape == (N_TEXT,)


def test_judging_needs_no_words() -> None:
    """Recorded workflows have none: then there is one mixture."""
    runs = [FinishedRun(("a", "b", "c")[: 1 + i % 3], group=f"{i}") for i in range(30)]
    learned, held = split(runs, 0.3, 0)
    weights = train_mixture(learned, None)
    assert weights.memory.n_ways == 1
    assert "mixture, names only" not in score_all(learned, held, weights)
    assert (
        score_forecasts(held, lambda r, i: Mixture(weights).forecast(r.steps[: i + 1])).accuracy[0]
        > 0
    )
