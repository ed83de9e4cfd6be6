"""Policies with a predictor that is right, or wrong: the ends between which a learned one lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from towerd.policy.base import Key, Tree
from towerd.policy.foresight import Foresight
from towerd.policy.pbkv import PBKV
from towerd.policy.predict.base import END, N_STEPS, Forecast
from towerd.policy.predict.fallback import Fallback
from towerd.policy.predict.markov import Markov
from towerd.policy.workflow_tree import WorkflowTree

Walks = Mapping[str, Sequence[str]]
"""The agents of each workflow's steps, by its client's name for it."""


class Oracle:
    """A Predictor that knows the whole walk of the workflow it is asked about."""

    def __init__(self, walks: Walks) -> None:
        self._walks = walks
        self.workflow = ""
        """The one asked about next, as policies call it: behind its tenant's name and a newline."""

    def forecast(self, path: Sequence[str]) -> Forecast:
        """See Predictor.forecast. Nothing of a workflow that is unknown."""
        tenant, _, name = self.workflow.rpartition("\n")
        walk = self._walks.get(name)
        if walk is None:
            return ()
        coming = walk[len(path) : len(path) + N_STEPS]
        said = [{f"{tenant}\n{agent}": 1.0} for agent in coming]
        return [*said, *({END: 1.0} for _ in range(N_STEPS - len(said)))]

    def observe(self, path: Sequence[str]) -> None:
        """Learns nothing."""


class Liar:
    """A Predictor that turns Markov's forecasts round: what is likeliest becomes least likely, among all
    agents seen and the end."""

    def __init__(self) -> None:
        self._markov = Markov()
        self._seen = {END: None}

    def forecast(self, path: Sequence[str]) -> Forecast:
        """See Predictor.forecast."""
        return [self._reversed(step) for step in self._markov.forecast(path)]

    def observe(self, path: Sequence[str]) -> None:
        """See Predictor.observe."""
        self._seen.setdefault(path[-1])
        self._markov.observe(path)

    def _reversed(self, step: Mapping[str, float]) -> Mapping[str, float]:
        names = sorted(self._seen, key=lambda name: step.get(name, 0.0))
        chances = sorted((step.get(name, 0.0) for name in names), reverse=True)
        return dict(zip(names, chances, strict=True))


class _Told(WorkflowTree):
    """Tells an oracle whose step it is asked about."""

    predictor: Oracle

    def stepped(
        self, key: Key, now: float, workflow: str, agent: str, base: Key | None = None
    ) -> None:
        self.predictor.workflow = workflow
        super().stepped(key, now, workflow, agent, base)


class ToldPBKV(_Told, PBKV):
    """PBKV with an oracle."""


class ToldForesight(_Told, Foresight):
    """foresight with an oracle."""


def lied_pbkv(tree: Tree) -> PBKV:
    """PBKV with a liar, and nothing that notices."""
    return PBKV(tree, Liar())


def lied_foresight(tree: Tree) -> Foresight:
    """foresight with a liar where a trained predictor would stand: in front of what it falls back to."""
    return Foresight(tree, Fallback([Liar(), Markov()]))
