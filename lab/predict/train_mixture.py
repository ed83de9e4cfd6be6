"""Training the mixture: its parts, and the weight of each on workflows that it has not seen.

No part may predict a workflow that it learned from, or it would get too much weight. Counts and
ridge regression leave out the whole group of a step, the latter in closed form; each graph model is
trained on all folds of the workflows but one, and predicts that one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lab.predict.runs import FinishedRun, folds, groups_of, remember
from towerd.policy.predict.base import N_STEPS
from towerd.policy.predict.graph import GraphWeights
from towerd.policy.predict.mixture import Array, GraphMean, MixtureWeights, curved
from towerd.policy.predict.mixture_file import FORMAT
from towerd.policy.predict.steps import (
    PARTS,
    StepFeatures,
    StepMemory,
    Steps,
    copied,
    counted,
    likeness,
    tally,
)

VOTERS_MAX = 3000
"""Maximum number of voters: steps that ridge regression keeps, and on which the weights are
learned. Training time is cubic in it."""
STEPS_MAX = 1 << 16
"""Maximum number of steps that are counted."""
N_GRAPHS = 3
_RIDGES = (15.0, 50.0, 150.0, 500.0)
_PRIOR = 10.0
"""Strength, in steps, of the prior that all parts have equal weights, whether or not the last name
is known."""
_PRIOR_AHEAD = 300.0
"""Strength, in steps, of the prior that weights are equal for all numbers of steps ahead: far ahead
the parts differ little, and mostly by chance."""
_SWEEPS = 200
_POWERS = (0.7, 0.85, 1.0, 1.15, 1.3, 1.5, 1.8)
_FLOORS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
GraphTrainer: TypeAlias = Callable[[Sequence[FinishedRun], int], GraphWeights]
"""Called with runs and a seed."""


@dataclass(frozen=True)
class TrainingSet:
    """The training data: runs in random order, groups together. places: for every step, its run and
    its index in it; groups: int [n], its group; part: int [n], the fold that its run is in. The
    first n_voters steps are the voters."""

    runs: list[FinishedRun]
    agents: tuple[str, ...]
    steps: Steps
    places: list[tuple[FinishedRun, int]]
    groups: NDArray[np.int64]
    part: NDArray[np.int64]

    @property
    def n_voters(self) -> int:
        return min(len(self.places), VOTERS_MAX)

    @property
    def n_outcomes(self) -> int:
        return 1 + len(self.agents)


def train_mixture(
    runs: Sequence[FinishedRun], train_graph: GraphTrainer | None, *, seed: int = 0
) -> MixtureWeights:
    """Learn from `runs`; train_graph: None for a mixture without graph models. Raises ValueError
    when there are fewer than two runs with steps."""
    runs = [run for run in runs if run.steps]
    if len(runs) < 2:
        raise ValueError(f"{len(runs)} workflows are too few to learn from")
    training = training_set(runs, seed)
    n, agents, steps = training.n_voters, training.agents, training.steps
    graphs = [] if train_graph is None else _graphs(training, train_graph, seed)
    parts, is_known = scores_by_names(training)
    votes, weights, curves = [], [], []
    for words in (False, True)[: 2 if steps.said.any() else 1]:
        voted, held_out = _ridge(steps[:n], training.groups[:n], training.n_outcomes, words=words)
        parts[:, PARTS.index("words" if words else "names")] = held_out
        if graphs:
            parts[:, PARTS.index("graph")] = _by_graph(training, graphs, words=words)
        found, curve = _weigh(parts, is_known, steps.outcomes[:n])
        votes.append(voted)
        weights.append(found)
        curves.append(curve)
    memory = StepMemory(steps.keys, steps.outcomes, steps[:n], np.stack(votes))
    return MixtureWeights(agents, memory, tuple(graphs), np.stack(weights), np.stack(curves))


def training_set(runs: Sequence[FinishedRun], seed: int) -> TrainingSet:
    names = groups_of(runs, N_GRAPHS)
    order = list(dict.fromkeys(names))
    random.Random(seed).shuffle(order)
    rank = {name: i for i, name in enumerate(order)}
    rows = sorted(range(len(runs)), key=lambda i: rank[names[i]])
    chosen: list[FinishedRun] = []
    groups: list[int] = []
    for i in rows:
        if len(groups) + len(runs[i].steps) <= STEPS_MAX or not chosen:
            chosen.append(runs[i])
            groups += [rank[names[i]]] * len(runs[i].steps)
    agents = tuple(sorted({name for run in chosen for name in run.steps}))
    numbers = {name: i for i, name in enumerate(agents)}
    part = [
        p for p, run in zip(folds(chosen, N_GRAPHS, seed), chosen, strict=True) for _ in run.steps
    ]
    places = [(run, i) for run in chosen for i in range(len(run.steps))]
    steps = remember(chosen, numbers, len(agents))
    return TrainingSet(chosen, agents, steps, places, np.array(groups), np.array(part))


def _graphs(training: TrainingSet, train_graph: GraphTrainer, seed: int) -> list[GraphWeights]:
    """One graph model for each fold of the runs, trained on the others."""
    part = folds(training.runs, N_GRAPHS, seed)
    found = []
    for out in range(N_GRAPHS):
        seen = [run for run, p in zip(training.runs, part, strict=True) if p != out]
        found.append(train_graph(seen if len(seen) > 1 else training.runs, seed + out))
    return found


def scores_by_names(training: TrainingSet) -> tuple[Array, NDArray[np.bool_]]:
    """float32 [voters, PARTS, N_STEPS, outcomes] with the parts that follow from counts, each
    without the counts of the step's group; and whether the last name is known without them."""
    n, steps = training.n_voters, training.steps
    out = np.zeros((n, len(PARTS), N_STEPS, training.n_outcomes), np.float32)
    is_known = np.zeros(n, np.bool_)
    columns = {name: i for i, name in enumerate(training.agents)}
    for group, rows in groupby(range(n), key=lambda row: training.groups[row]):
        others = training.groups != group
        keys, outcomes = steps.keys[others], steps.outcomes[others]
        every = tally(outcomes, training.n_outcomes)
        for row in rows:
            run, i = training.places[row]
            now = StepFeatures(steps.keys[row], steps.said[row], steps.talk[row])
            markov, is_known[row] = counted(now, keys, outcomes, every)
            local = copied(run.steps[: i + 1], columns, training.n_outcomes)
            out[row, : len(markov) + len(local)] = [*markov, *local]
    return out, is_known


def _by_graph(training: TrainingSet, graphs: Sequence[GraphWeights], *, words: bool) -> Array:
    """float32 [voters, N_STEPS, outcomes]: each step's forecast by a model that did not see it."""
    means = [GraphMean([graph], training.agents) for graph in graphs]
    out = np.zeros((training.n_voters, N_STEPS, training.n_outcomes), np.float32)
    for row, (run, i) in enumerate(training.places[: training.n_voters]):
        x = run.meanings[i] if words and run.meanings else None
        out[row] = means[training.part[row]].chances(run.steps[: i + 1], x)
    return out


def _ridge(
    voters: Steps, groups: NDArray[np.int64], n_outcomes: int, *, words: bool
) -> tuple[Array, Array]:
    """(votes: float32 [n, N_STEPS * outcomes]; scores of the voters without the votes of their own
    group: [n, N_STEPS, outcomes]). Each number of steps ahead gets the ridge of _RIDGES with the
    least squared error of these scores."""
    n = len(voters)
    alike = likeness(voters, voters, words=words)
    target = np.zeros((n, N_STEPS, n_outcomes), np.float32)
    row, ahead = np.nonzero(voters.outcomes >= 0)
    target[row, ahead, voters.outcomes[row, ahead]] = 1.0
    votes, scores, least = np.zeros_like(target), np.zeros_like(target), [np.inf] * N_STEPS
    for ridge in _RIDGES:
        kernel = alike + np.float32(ridge) * np.eye(n, dtype=np.float32)
        inverse: Array = np.linalg.inv(kernel).astype(np.float32)
        found = inverse @ target.reshape(n, -1)
        held_out = left_out(inverse, found, target.reshape(n, -1), groups).reshape(target.shape)
        for k in range(N_STEPS):
            there = voters.outcomes[:, k] >= 0
            error = float(((held_out - target)[there, k] ** 2).sum())
            if error < least[k]:
                least[k], scores[:, k] = error, held_out[:, k]
                votes[:, k] = found.reshape(target.shape)[:, k]
    return votes.reshape(n, -1), scores


def left_out(inverse: Array, votes: Array, target: Array, groups: NDArray[np.int64]) -> Array:
    """[n, m]: the prediction of ridge regression for every row without the rows of its group.
    inverse: of the kernel with the ridge, [n, n]; votes: inverse @ target."""
    out = np.empty_like(target)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        out[rows] = target[rows] - np.linalg.solve(inverse[np.ix_(rows, rows)], votes[rows])
    return out


def _weigh(
    parts: Array, is_known: NDArray[np.bool_], outcomes: NDArray[np.int32]
) -> tuple[Array, Array]:
    """(weights, curve) as in MixtureWeights, for one of the two ways."""
    weights = np.zeros((2, N_STEPS, len(PARTS)), np.float32)
    curve = np.zeros((N_STEPS, 2), np.float32)
    rows, ahead = np.nonzero(outcomes >= 0)
    shown, came, known = parts[rows, :, ahead], outcomes[rows, ahead], is_known[rows]
    every = stacked(shown, came, np.full(len(PARTS), 1.0 / len(PARTS)), _PRIOR)
    for way in (0, 1):
        here = known == bool(way)
        both = stacked(shown[here], came[here], every, _PRIOR)
        for k in range(N_STEPS):
            at = here & (ahead == k)
            weights[way, k] = stacked(shown[at], came[at], both, _PRIOR_AHEAD)
    for k in range(N_STEPS):
        at = ahead == k
        scores = np.einsum("np,npc->nc", weights[known[at].astype(np.int64), k], shown[at])
        curve[k] = _best_curve(scores, came[at])
    return weights, curve


def stacked(
    parts: Array, outcomes: NDArray[np.int32], prior: NDArray[np.float64], strength: float
) -> NDArray[np.float64]:
    """Weights of at least 0 with the least squared error, pulled towards `prior` with the weight of
    `strength` rows, by coordinate descent; parts: [n, PARTS, outcomes]; outcomes: [n]."""
    flat = parts.transpose(1, 0, 2).reshape(parts.shape[1], -1)
    square = (flat @ flat.T).astype(np.float64) + strength * np.eye(len(flat))
    hits = parts[np.arange(len(parts)), :, outcomes].sum(0) + strength * prior
    weights = prior.copy()
    for _ in range(_SWEEPS):
        for j in range(len(weights)):
            rest = hits[j] - square[j] @ weights + square[j, j] * weights[j]
            weights[j] = max(0.0, rest / square[j, j])
    return weights


def _best_curve(scores: Array, outcomes: NDArray[np.int32]) -> tuple[float, float]:
    """(power, floor) that maximize the likelihood of the outcomes; scores: [n, outcomes]."""

    def loss(power: float, floor: float) -> float:
        curve = np.array([[power, floor]], np.float32)
        chances = curved(scores[:, None], curve)[np.arange(len(scores)), 0, outcomes]
        return -float(np.log(np.maximum(chances, 1e-30)).sum())

    grid = [(power, floor) for power in _POWERS for floor in _FLOORS]
    return min(grid, key=lambda each: loss(*each)) if len(scores) else (1.0, _FLOORS[0])


def n_parameters(weights: MixtureWeights) -> int:
    """The number of learned parameters of the graph models and the mixture; counts, votes and transition
    matrices are data."""
    arrays = (pair for graph in weights.graphs for pair in graph.arrays.items())
    return weights.weights.size + sum(a.size for name, a in arrays if name != "transitions")


def save(weights: MixtureWeights, path: Path) -> None:
    """Write the weights to `path`, atomically, for `towerd.policy.predict.mixture_file` to load."""
    memory = weights.memory
    named: dict[str, Any] = {
        "format": np.array(FORMAT),
        "agents": np.array(weights.agents, dtype=np.str_),
        "keys": memory.keys,
        "outcomes": memory.outcomes,
        "said": memory.voters.said.astype(np.float16),
        "talk": memory.voters.talk.astype(np.float16),
        "votes": memory.votes,
        "weights": weights.weights,
        "curve": weights.curve,
    }
    for i, graph in enumerate(weights.graphs):
        named[f"graph {i} agents"] = np.array(graph.agents, dtype=np.str_)
        named |= {f"graph {i} {name}": array for name, array in graph.arrays.items()}
    part = path.with_name(path.name + ".part")
    with part.open("wb") as stream:
        np.savez(stream, **named)
    part.replace(path)
