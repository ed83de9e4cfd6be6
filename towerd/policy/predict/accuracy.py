"""How often a predictor is right, and whether it is as sure as it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from towerd.policy.predict.base import END, N_STEPS, Forecast, best
from towerd.policy.predict.runs import Run

_BINS = 10


@dataclass(frozen=True, slots=True)
class Accuracy:
    """right: the share of places at which the likeliest outcome 1, 2, ... steps ahead came true,
    END included, places beyond it left out; calibration_error: of one step ahead, the mean
    distance between how sure and how often right, over ten bins of sureness; n: places."""

    right: tuple[float, ...]
    calibration_error: float
    n: int


def accuracy(runs: Sequence[Run], forecast: Callable[[Run, int], Forecast]) -> Accuracy:
    """forecast(run, i): what is said after step i of the run. No forecast is a wrong one."""
    n_right, n_all = [0] * N_STEPS, [0] * N_STEPS
    sure, hits, filled = [0.0] * _BINS, [0] * _BINS, [0] * _BINS
    for run in runs:
        outcomes = [*run.steps, END]
        for i in range(len(run.steps)):
            said = forecast(run, i)
            for k, outcome in enumerate(outcomes[i + 1 : i + 1 + N_STEPS]):
                n_all[k] += 1
                if not said:
                    continue
                name = best(said[k])
                n_right[k] += name == outcome
                if k == 0:
                    at = min(_BINS - 1, int(said[0][name] * _BINS))
                    sure[at] += said[0][name]
                    hits[at] += name == outcome
                    filled[at] += 1
    right = tuple(r / n if n else 0.0 for r, n in zip(n_right, n_all, strict=True))
    error = sum(abs(s - h) for s, h in zip(sure, hits, strict=True))
    return Accuracy(right, error / max(1, sum(filled)), n_all[0])
