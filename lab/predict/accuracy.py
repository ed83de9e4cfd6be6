"""How often a predictor is right, and whether it is as sure as it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.predict.runs import Run, groups_of
from towerd.policy.predict.base import END, N_STEPS, Forecast, best

_BINS = 10


@dataclass(frozen=True, slots=True)
class Judged:
    """Of n places in workflows: right: float64 [n, N_STEPS], 1 where the likeliest outcome 1, 2,
    ... steps ahead came true, END included, NaN beyond it; sure: [n], how likely it was one step
    ahead, NaN without a forecast; groups: of which task the workflow is."""

    right: NDArray[np.float64]
    sure: NDArray[np.float64]
    groups: tuple[str, ...]

    @property
    def accuracy(self) -> tuple[float, ...]:
        """The share of places at which it was right, per number of steps ahead."""
        n = np.maximum(1, (~np.isnan(self.right)).sum(0))
        return tuple((np.nansum(self.right, axis=0) / n).tolist())

    @property
    def calibration_error(self) -> float:
        """Of one step ahead, the mean distance between how sure and how often right, over ten
        bins of sureness."""
        said = ~np.isnan(self.sure)
        bins = np.minimum(_BINS - 1, (self.sure[said] * _BINS).astype(np.int64))
        off = np.bincount(bins, self.sure[said] - self.right[said, 0], _BINS)
        return float(np.abs(off).sum() / max(1, said.sum()))

    def ahead_of(self, other: Judged) -> tuple[tuple[float, float], ...]:
        """Per number of steps ahead, by how much this accuracy is above that of `other` at the
        same places, and the standard error of it; workflows of one task count as one draw."""
        _, group = np.unique(self.groups, return_inverse=True)
        out = []
        for k in range(N_STEPS):
            there = ~np.isnan(self.right[:, k])
            gain = (self.right - other.right)[there, k]
            mean = float(gain.mean()) if len(gain) else 0.0
            sums = np.bincount(group[there], gain - mean)
            out.append((mean, float(np.sqrt((sums**2).sum()) / max(1, len(gain)))))
        return tuple(out)


def judge(runs: Sequence[Run], forecast: Callable[[Run, int], Forecast]) -> Judged:
    """forecast(run, i): what is said after step i of the run. No forecast is a wrong one."""
    rows: list[list[float]] = []
    sure: list[float] = []
    groups: list[str] = []
    for run, group in zip(runs, groups_of(runs, 2), strict=True):
        outcomes = [*run.steps, END]
        for i in range(len(run.steps)):
            said = forecast(run, i)
            came = outcomes[i + 1 : i + 1 + N_STEPS]
            names = [best(each) for each in said] if said else [""] * N_STEPS
            row = [float(name == outcome) for name, outcome in zip(names, came, strict=False)]
            rows.append(row + [np.nan] * (N_STEPS - len(row)))
            sure.append(said[0][best(said[0])] if said else np.nan)
            groups.append(group)
    return Judged(np.array(rows).reshape(-1, N_STEPS), np.array(sure), tuple(groups))


def together(parts: Sequence[Judged]) -> Judged:
    """The places of all parts."""
    return Judged(
        np.concatenate([part.right for part in parts]),
        np.concatenate([part.sure for part in parts]),
        tuple(group for part in parts for group in part.groups),
    )
