"""Visits sorted into classes, and survival curves by class (the Kaplan-Meier estimator).

Per class and per bin of idle time: how many visits were still away when the bin began, and how
many returned within it; those that never returned count too. Classes with few visits lean on
coarser ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Table: TypeAlias = NDArray[np.float64]
CHANCE = 0.01
"""Of a return within any bin, before any data."""
_PRIOR_VISITS = 10.0


class VisitClass(NamedTuple):
    """stop: why the answer ended, or before it has, "?" and why the one before did; gap: how
    long its conversation was away; service: how long the answer took. Both are buckets from 1
    on; 0 stands for all of them."""

    stop: str
    gap: int = 0
    service: int = 0

    def coarser(self) -> VisitClass | None:
        """The class whose visits stand in for missing ones; None: there is none."""
        if self == ALL:
            return None
        if self.service:
            return self._replace(service=0)
        return self._replace(gap=0) if self.gap else ALL


ALL = VisitClass("*")


def bucket(value: float | None, edges: tuple[float, ...]) -> int:
    """1: there is no value; then one for each range between the edges."""
    return 1 if value is None else 2 + bisect_right(edges, value)


class Classes:
    """The classes that were seen, numbered, and the curve of each."""

    def __init__(self, n_bins: int) -> None:
        self._n_bins = n_bins
        self._numbers: dict[VisitClass, int] = {}
        self._up: list[int] = []
        """Of each class its coarser one; -1: none."""
        self._prior: dict[VisitClass, Table] = {}
        self.curves = np.zeros((0, n_bins))
        """[classes at the last `learn`, bins]: the chance of a return within a bin."""
        self.number(ALL)

    def number(self, of: VisitClass) -> int:
        """The number of a class; those that it leans on have lower ones."""
        found = self._numbers.get(of)
        if found is not None:
            return found
        up = of.coarser()
        self._up.append(self.number(up) if up is not None else -1)
        self._numbers[of] = len(self._numbers)
        return self._numbers[of]

    def known(self, of: VisitClass) -> int:
        """The number of the class, or of the finest one above it, that has a curve."""
        at = self._numbers.get(of, -1)
        if at < 0:
            at = self.number(of)
        while at >= len(self.curves) and self._up[at] >= 0:
            at = self._up[at]
        return at

    def learn(
        self, of: NDArray[np.int64], last: NDArray[np.int64], returned: NDArray[np.bool_]
    ) -> None:
        """Make all curves anew from visits: their class, the bin in which they returned or are
        away, and whether they returned. Those that are away are not through with their bin."""
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
        """Lean on these curves until visits say otherwise."""
        self._prior = dict(table)
        for of in table:
            self.number(of)
        nothing = np.zeros(0, np.int64)
        self.learn(nothing, nothing, np.zeros(0, np.bool_))
