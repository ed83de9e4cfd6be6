"""The mean of several predictors: the graph model knows what was said, Markov what was counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from towerd.policy.predict.base import Forecast


def blend(forecasts: Sequence[Forecast]) -> Forecast:
    """Per step the mean of the distributions of those that have one."""
    said = [forecast for forecast in forecasts if forecast]
    if len(said) < 2:
        return said[0] if said else ()
    return [_mean(steps) for steps in zip(*said, strict=True)]


def _mean(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in names}
