"""The accuracy and the calibration of a predictor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from lab.predict.runs import FinishedRun, groups_of
from towerd.policy.predict.base import END, N_STEPS, Forecast, best

CHANCE_MIN = 1e-4
"""What an outcome that a forecast leaves out counts as, in its loss."""
_BINS = 10


@dataclass(frozen=True, slots=True)
class ForecastScores:
    """Scores at n places in workflows. right: float64 [n, N_STEPS], 1 where the likeliest outcome
    1, 2, ... steps ahead came true (END included), NaN beyond the end; sure: [n], the probability
    of the likeliest outcome one step ahead, NaN without a forecast; loss: [n], the negative
    logarithm of the probability of what came one step ahead, at least CHANCE_MIN; groups: the
    workflows' tasks."""

    right: NDArray[np.float64]
    sure: NDArray[np.float64]
    loss: NDArray[np.float64]
    groups: tuple[str, ...]

    @property
    def accuracy(self) -> tuple[float, ...]:
        """The share of places at which the forecast was right, per number of steps ahead."""
        n = np.maximum(1, (~np.isnan(self.right)).sum(0))
        return tuple((np.nansum(self.right, axis=0) / n).tolist())

    @property
    def calibration_error(self) -> float:
        """Expected calibration error one step ahead: the mean distance between confidence and
        accuracy, over ten bins of confidence."""
        said = ~np.isnan(self.sure)
        bins = np.minimum(_BINS - 1, (self.sure[said] * _BINS).astype(np.int64))
        off = np.bincount(bins, self.sure[said] - self.right[said, 0], _BINS)
        return float(np.abs(off).sum() / max(1, said.sum()))

    @property
    def log_loss(self) -> float:
        """The mean loss, in nats."""
        return float(self.loss.mean()) if len(self.loss) else 0.0

    def ahead_of(self, other: ForecastScores) -> tuple[tuple[float, float], ...]:
        """Per number of steps ahead, how much this accuracy exceeds that of `other` at the same
        places, and the standard error; the workflows of one task count as one sample."""
        _, group = np.unique(self.groups, return_inverse=True)
        out = []
        for k in range(N_STEPS):
            there = ~np.isnan(self.right[:, k])
            gain = (self.right - other.right)[there, k]
            mean = float(gain.mean()) if len(gain) else 0.0
            sums = np.bincount(group[there], gain - mean)
            out.append((mean, float(np.sqrt((sums**2).sum()) / max(1, len(gain)))))
        return tuple(out)


def score_forecasts(
    runs: Sequence[FinishedRun], forecast: Callable[[FinishedRun, int], Forecast]
) -> ForecastScores:
    """The scores of `forecast(run, i)`, the forecast after step i of a run, at all steps. No
    forecast counts as a wrong one."""
    rows: list[list[float]] = []
    sure: list[float] = []
    loss: list[float] = []
    groups: list[str] = []
    for run, group in zip(runs, groups_of(runs, 2), strict=True):
        outcomes = [*run.steps, END]
        for i in range(len(run.steps)):
            said = forecast(run, i)
            came = outcomes[i + 1 : i + 1 + N_STEPS]
            names = [best(each) if each else "" for each in said] or [""] * N_STEPS
            row = [float(name == outcome) for name, outcome in zip(names, came, strict=False)]
            rows.append(row + [np.nan] * (N_STEPS - len(row)))
            sure.append(said[0][best(said[0])] if said else np.nan)
            chance = said[0].get(came[0], 0.0) if said else 0.0
            loss.append(-log(max(CHANCE_MIN, chance)))
            groups.append(group)
    right = np.array(rows).reshape(-1, N_STEPS)
    return ForecastScores(right, np.array(sure), np.array(loss), tuple(groups))


def concatenate(parts: Sequence[ForecastScores]) -> ForecastScores:
    """The scores of all parts together."""
    return ForecastScores(
        np.concatenate([part.right for part in parts]),
        np.concatenate([part.sure for part in parts]),
        np.concatenate([part.loss for part in parts]),
        tuple(group for part in parts for group in part.groups),
    )
