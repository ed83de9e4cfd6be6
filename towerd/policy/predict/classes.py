"""Visits sorted into classes, and survival curves by class (the Kaplan-Meier estimator).

For each class and each bin of idle time, count the visits that were still away when the bin began
and those that returned within it. Visits that never returned count too. Classes with few visits are
shrunk towards coarser ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Table: TypeAlias = NDArray[np.float64]
CHANCE = 0.01
"""The probability of a return within any bin, before any data."""
_PRIOR_VISITS = 10.0


class VisitClass(NamedTuple):
    """stop: why the answer ended, or, before it has, "?" and why the previous one did; gap: how
    long its conversation was away; service: how long the answer took. Both are buckets from 1
    on; 0 stands for all buckets."""

    stop: str
    gap: int = 0
    service: int = 0

    def coarser(self) -> VisitClass | None:
        """The class that this one is shrunk towards; None: there is none."""
        if self == ALL:
            return None
        if self.service:
            return self._replace(service=0)
        return self._replace(gap=0) if self.gap else ALL


ALL = VisitClass("*")


def bucket(value: float | None, edges: tuple[float, ...]) -> int:
    """1 for None, then one bucket for each range between the edges, from 2 on."""
    return 1 if value is None else 2 + bisect_right(edges, value)


class Classes:
    """All classes seen so far, numbered, and the curve of each."""

    def __init__(self, n_bins: int) -> None:
        self._n_bins = n_bins
        self._numbers: dict[VisitClass, int] = {}
        self._up: list[int] = []
        """The coarser class of each class; -1: none."""
        self._prior: dict[VisitClass, Table] = {}
        self.curves = np.zeros((0, n_bins))
        """[classes at the last `learn`, bins]: the probability of a return within a bin."""
        self.number(ALL)

    def number(self, of: VisitClass) -> int:
        """The number of a class; coarser classes have lower numbers."""
        found = self._numbers.get(of)
        if found is not None:
            return found
        up = of.coarser()
        self._up.append(self.number(up) if up is not None else -1)
        self._numbers[of] = len(self._numbers)
        return self._numbers[of]

    def known(self, of: VisitClass) -> int:
        """The number of the class, or of the finest coarser one that has a curve."""
        at = self._numbers.get(of, -1)
        if at < 0:
            at = self.number(of)
        while at >= len(self.curves) and self._up[at] >= 0:
            at = self._up[at]
        return at

    def learn(
        self, of: NDArray[np.int64], last: NDArray[np.int64], returned: NDArray[np.bool_]
    ) -> None:
        """Recompute all curves from visits. of: their classes; last: the bin in which each
        returned, or is away now; returned: whether it did. A visit that is still away has not
        completed its last bin."""
        n = len(self._up)
        cells = of * self._n_bins + last
        shape = (n, self._n_bins)
        came = np.bincount(cells[returned], minlength=n * self._n_bins).reshape(shape)
        left = np.bincount(cells[~returned], minlength=n * self._n_bins).reshape(shape)
        for i in range(n - 1, 0, -1):
            came[self._up[i]] += came[i]
            left[self._up[i]] += left[i]
        at_risk = np.cumsum((came + left)[:, ::-1], axis=1)[:, ::-1] - left
        curves = np.full(shape, CHANCE)
        for (name, i), up in zip(self._numbers.items(), self._up, strict=True):
            prior = self._prior.get(name)
            if prior is None:
                prior = curves[up] if up >= 0 else curves[i]
            curves[i] = (came[i] + _PRIOR_VISITS * prior) / (at_risk[i] + _PRIOR_VISITS)
        self.curves = curves

    def table(self) -> list[tuple[VisitClass, Table]]:
        """All curves, for `recall`."""
        return list(zip(self._numbers, self.curves, strict=False))

    def recall(self, table: Mapping[VisitClass, Table]) -> None:
        """Use these curves as priors."""
        self._prior = dict(table)
        for of in table:
            self.number(of)
        nothing = np.zeros(0, np.int64)
        self.learn(nothing, nothing, np.zeros(0, np.bool_))
