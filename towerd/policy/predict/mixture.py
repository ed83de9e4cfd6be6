"""The predictor of agent steps: a weighted mixture of several models.

For each number of steps ahead, the scores of all PARTS are added with weights learned on workflows
held out from the parts (stacked regression, Breiman 1996). There are separate weights for known and
unknown last names, and for steps with and without words. A power and a floor, learned on the same
workflows, turn the sums into probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from towerd.policy.predict.base import END, N_STEPS, Forecast, Predictor
from towerd.policy.predict.graph import PATH_MAX, GraphPredictor, GraphWeights
from towerd.policy.predict.steps import (
    PARTS,
    Scores,
    StepMemory,
    Vector,
    copied,
    counted,
    step,
    tally,
)
from towerd.policy.predict.tenants import MARK

Array = NDArray[np.float32]


@dataclass(frozen=True)
class MixtureWeights:
    """agents: the names seen in training, outcomes 0, 1, ..., then END; graphs: models trained on
    different workflows, averaged; weights: float32 [ways, 2, N_STEPS, PARTS], at least 0, for
    unknown and known last names; curve: float32 [ways, N_STEPS, 2], power and floor."""

    agents: tuple[str, ...]
    memory: StepMemory
    graphs: tuple[GraphWeights, ...]
    weights: Array
    curve: Array


class GraphMean:
    """The part `graph`: the mean of several graph models, over the mixture's outcomes."""

    def __init__(self, graphs: Sequence[GraphWeights], agents: Sequence[str]) -> None:
        columns = {name: i for i, name in enumerate([*agents, END])}
        self.n_outcomes = len(columns)
        self._members = [GraphPredictor(each) for each in graphs]
        self._columns = [
            np.array([columns[name] for name in (*each.agents, END)], np.int64) for each in graphs
        ]

    def chances(self, path: Sequence[str], x: Vector | None) -> Scores:
        """Mean probabilities float32 [N_STEPS, outcomes] over agents and END."""
        out = np.zeros((N_STEPS, self.n_outcomes), np.float32)
        for member, columns in zip(self._members, self._columns, strict=True):
            out[:, columns] += member.chances(path, x)[:, 1:]
        return out / np.float32(max(1, len(self._members)))


class Mixture:
    """A trained Predictor, which learns nothing online; without `meanings` it uses names alone."""

    def __init__(self, weights: MixtureWeights) -> None:
        self._agents = weights.agents
        self._memory = weights.memory
        self._graph = GraphMean(weights.graphs, weights.agents)
        self._every = tally(weights.memory.outcomes, len(weights.agents) + 1)
        self._weights, self._curve = weights.weights, weights.curve
        self._columns = {name: i for i, name in enumerate(weights.agents)}

    def forecast(self, path: Sequence[str], meanings: Sequence[Vector] = ()) -> Forecast:
        """See Predictor.forecast. meanings: embeddings float32 [N_TEXT] of every step of the
        path."""
        if not path:
            return ()
        meanings = meanings[-PATH_MAX:]
        path = path[-PATH_MAX:]
        new = [name for name in dict.fromkeys(path) if name not in self._columns]
        names = [*self._agents, END, *new]
        columns = self._columns | {name: names.index(name) for name in new}
        way = int(bool(len(meanings)) and self._memory.n_ways > 1)
        parts, is_known = self.parts(path, meanings if way else (), columns, len(names))
        scores = np.einsum("kp,pkc->kc", self._weights[way, int(is_known)], parts)
        chances = curved(scores, self._curve[way])
        return [dict(zip(names, row, strict=True)) for row in chances.tolist()]

    def observe(self, path: Sequence[str]) -> None:
        """Learns nothing: `towerctl train predictor` trains the weights."""

    def parts(
        self, path: Sequence[str], meanings: Sequence[Vector], columns: dict[str, int], n: int
    ) -> tuple[Array, bool]:
        """Scores float32 [PARTS, N_STEPS, n], and whether the last name is known. columns: the
        outcome numbers, below n, of the names of the path."""
        now = step(path, meanings)
        memory = self._memory
        markov, is_known = counted(now, memory.keys, memory.outcomes, self._every)
        rows = {f"markov{1 + i}": each for i, each in enumerate(markov)}
        rows["copy"], rows["recent"] = copied(path, columns, n)
        rows["names"] = memory.voted(now, words=False)
        if len(meanings):
            rows["words"] = memory.voted(now, words=True)
        rows["graph"] = self._graph.chances(path, meanings[-1] if len(meanings) else None)
        out = np.zeros((len(PARTS), N_STEPS, n), np.float32)
        for i, name in enumerate(PARTS):
            if name in rows:
                out[i, :, : rows[name].shape[1]] = rows[name]
        return out, is_known


def curved(scores: Array, curve: Array) -> Array:
    """Probabilities over the last axis; scores: [..., N_STEPS, outcomes]; curve: see
    MixtureWeights."""
    power, floor = curve[:, :1], curve[:, 1:]
    raised = (np.maximum(scores, 0.0) + floor) ** power
    chances: Array = raised / raised.sum(-1, keepdims=True)
    return chances


class Trained:
    """A predictor for the daemon, where an agent's name is prefixed by its tenant: strips tenants from names before prediction, and adds the tenant of the last step to the
    names of a forecast."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def forecast(self, path: Sequence[str]) -> Forecast:
        """See Predictor.forecast."""
        tenant, mark, _ = path[-1].rpartition(MARK)
        said = self._predictor.forecast([name.rpartition(MARK)[2] for name in path])
        return [
            {name if name == END else tenant + mark + name: p for name, p in step.items()}
            for step in said
        ]

    def observe(self, path: Sequence[str]) -> None:
        """See Predictor.observe."""
        self._predictor.observe([name.rpartition(MARK)[2] for name in path])
