"""PBKV: prediction-based eviction for agent workflows (Zheng et al., section 4.2).

Retired keys, whose workflows are all over, are evicted first, starting with those that the fewest
workflows used; then active ones by equation 2: how likely they are to be used in the next K steps
of the workflows that used them. A key that no workflow used has score 0 and is ranked by its last
use.
"""

from __future__ import annotations

from heapq import nlargest
from typing import Any

from towerd.policy.base import Entry, Key, Rank, Tree
from towerd.policy.predict.base import END, Predictor, survival
from towerd.policy.predict.markov import Markov
from towerd.policy.predict.tenants import TenantPredictors
from towerd.policy.workflow_tree import WorkflowRun, WorkflowTree

GAMMA = 0.7
"""Confidence decay per step (section 6.2 uses the same)."""


class PBKV(WorkflowTree):
    """A step of a workflow updates its forecast and the ranks of the leaves it used: O(log n)
    each, as ranks are put on the heap when victims are requested."""

    def __init__(
        self, tree: Tree, predictor: Predictor | None = None, *, gamma: float = GAMMA
    ) -> None:
        super().__init__(tree, predictor or TenantPredictors(lambda share: Markov(share=share)))
        if not 0 < gamma < 1:
            raise ValueError(f"gamma is {gamma}, not between 0 and 1")
        self.gamma = gamma

    def score(self, key: Key) -> float:
        """Equation 2: the sum over workflows and steps of gamma^(k-1) s A P."""
        total = 0.0
        for workflow, agents in self.users.get(key, {}).items():
            gains = self.runs[workflow].gains
            total += sum(gains.get(agent, 0.0) for agent in agents)
        return total

    def value(self, key: Key) -> float:
        """Equation 1, used for prefetching: the same for the next step alone."""
        total = 0.0
        for workflow, agents in self.users.get(key, {}).items():
            forecast = self.runs[workflow].forecast
            if forecast:
                total += sum(forecast[0].get(agent, 0.0) for agent in agents)
        return total

    def explain(self, key: Key, now: float) -> dict[str, Any]:
        found = super().explain(key, now)
        if found:
            found["score"] = self.score(key)
            found |= {"retired": self.is_retired(key), "next_step": self.value(key)}
            found["workflows"] = len(self.users.get(key, {}))
        return found

    def wanted(self, now: float, most: int) -> list[tuple[Key, float]]:
        """See ReuseForecaster.wanted. These are the ends of agents' last towers, which the next
        step of a workflow may use again, by equation 1."""
        chances: dict[Key, float] = {}
        for run in self.runs.values():
            step = run.forecast[0] if run.forecast else {}
            for agent, end in run.ends.items():
                if (chance := step.get(agent, 0.0)) > 0.0:
                    chances[end] = chances.get(end, 0.0) + chance
        return nlargest(most, chances.items(), key=lambda pair: pair[1])

    def _rank(self, entry: Entry) -> Rank:
        if self.is_retired(entry.key):
            return -1.0 / (1 + self._n_over[entry.key]), entry.used
        return self.score(entry.key), entry.used

    def _on_step(self, run: WorkflowRun) -> None:
        run.gains = {}
        weight = 1.0
        for alive, step in zip(survival(run.forecast), run.forecast, strict=True):
            for agent, chance in step.items():
                if agent != END:
                    run.gains[agent] = run.gains.get(agent, 0.0) + weight * alive * chance
            weight *= self.gamma
