"""The interface of workflow-step predictors: pure, synchronous, any agent names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

END = "<end>"
"""The symbol that follows the last step of a workflow."""
N_STEPS = 3
"""How far predictions look ahead (K of PBKV, section 4.2.2)."""

Forecast: TypeAlias = Sequence[Mapping[str, float]]
"""For each step ahead, a distribution over agents and END, given that the workflow lasts until
then. An empty sequence: no prediction."""

Share: TypeAlias = Callable[[], float]
"""The share of the memory of all tenants' predictors that one of them may take now."""


class Predictor(Protocol):
    """Forecasts the next steps of workflows, and may learn from the steps that it observes."""

    def forecast(self, path: Sequence[str]) -> Forecast:
        """The N_STEPS steps that follow `path`, whose latest step comes last."""
        ...

    def observe(self, path: Sequence[str]) -> None:
        """A workflow has taken the last step of `path`, which may be END. Called once for every
        step of every workflow."""
        ...


class NoPrediction:
    """For workloads without a predictor."""

    def forecast(self, path: Sequence[str]) -> Forecast:
        """Returns no prediction."""
        return ()

    def observe(self, path: Sequence[str]) -> None:
        """Learns nothing."""


def whole() -> float:
    """The Share of a predictor that is the only one."""
    return 1.0


def best(step: Mapping[str, float]) -> str:
    """The likeliest outcome; ties go to the first by name."""
    return min(step, key=lambda name: (-step[name], name))


def survival(forecast: Forecast) -> list[float]:
    """PBKV's s_w^(k): the probability that the workflow is still running at each step."""
    out, alive = [], 1.0
    for step in forecast:
        out.append(alive)
        alive *= 1.0 - step.get(END, 0.0)
    return out
