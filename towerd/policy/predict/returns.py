"""Return times of idle conversations: a survival model, learned online, and its value.

A visit is described twice: when it is asked, and again when it is answered. The probability of a
return within each bin of idle time is that of its class (see `classes`), corrected by a network
(see `hazard`). Both learn from the latest visits, including those that are still away.

Keeping an entry until time H occupies its space for min(return, H) and saves its length with the
probability of a return by then. The best ratio over H is its Gittins index (see
`gittins`): returns per second of occupancy. The entry with the lowest index is evicted
first.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from towerd.kernels import hazard
from towerd.kernels._native import gittins
from towerd.policy.predict.classes import Classes, VisitClass
from towerd.policy.predict.hazard import HazardNet

Table: TypeAlias = NDArray[np.float64]
_RATIO = 1.4
_FIRST_S = 0.5
N_BINS = 40
EDGES_S = (0.0, *(_FIRST_S * _RATIO**i for i in range(N_BINS - 1)))
"""Where the bins of idle time begin; the last one, from 2 days on, is unbounded."""
WIDTHS_S = tuple(b - a for a, b in zip(EDGES_S, EDGES_S[1:], strict=False)) + (EDGES_S[-1],)
VISITS_MAX = 16384
"""The model learns from this many latest visits, so that it follows present behaviour."""
_CURVES_KEPT = 1024
"""Curves kept across a restart."""
_BATCH = 256
_STEPS = 8
_WIDTHS_S = np.array(WIDTHS_S)


class ReturnModel:
    """Learns from visits; indices are in returns per second of occupancy."""

    def __init__(self, n_features: int) -> None:
        self._n_features = n_features
        self.classes = Classes(N_BINS)
        self._x = np.zeros((2, VISITS_MAX, n_features), np.float32)
        self._of = np.zeros((2, VISITS_MAX), np.int64)
        self._since_s = np.full((2, VISITS_MAX), np.nan)
        """When a visit was asked and answered; nan: not yet."""
        self._back_s = np.full(VISITS_MAX, np.inf)
        self._n = 0
        self._served: hazard.HazardWeights | None = None

    @cached_property
    def net(self) -> HazardNet:
        """Made when there is something to learn, so that a start need not import numpy.random."""
        return HazardNet(self._n_features, N_BINS)

    @cached_property
    def _rng(self) -> np.random.Generator:
        return np.random.default_rng(0)

    def asked(self, of: VisitClass, x: array[float], now: float) -> int:
        """A visit began; returns its number."""
        row = self._n % VISITS_MAX
        self._n += 1
        self._back_s[row] = np.inf
        self._since_s[1, row] = np.nan
        self._describe(0, row, of, x, now)
        return self._n - 1

    def answered(self, number: int, of: VisitClass, x: array[float], now: float) -> None:
        """A visit was answered."""
        if number >= self._n - VISITS_MAX:
            self._describe(1, number % VISITS_MAX, of, x, now)

    def returned(self, number: int, now: float) -> None:
        """A visit came back."""
        if number >= self._n - VISITS_MAX:
            self._back_s[number % VISITS_MAX] = now

    def learn(self, now: float) -> None:
        """Recompute the curves of all classes, then train for a few steps on random visits."""
        n = min(self._n, VISITS_MAX)
        if not n:
            return
        is_answered = np.isfinite(self._since_s[1, :n]).astype(np.int64)
        stage = np.concatenate([np.zeros(n, np.int64), np.ones(is_answered.sum(), np.int64)])
        rows = np.concatenate([np.arange(n), np.flatnonzero(is_answered)])
        self.classes.learn(self._of[stage, rows], *self._outcomes(stage, rows, now))
        for _ in range(_STEPS):
            rows = self._rng.integers(0, n, _BATCH)
            stage = self._rng.integers(0, 2, _BATCH) * is_answered[rows]
            x = self._x[stage, rows].astype(np.float64)
            curves = self.classes.curves[self._of[stage, rows]]
            self.net.step(x, curves, *self._outcomes(stage, rows, now))
        self._serve()

    def tables(self, of: Sequence[VisitClass], x: Table) -> list[array[float]]:
        """Tables [n][bins]: the index of each visit by how long it has been away; 0 before any
        data. x: [n, features]. Tables are arrays, as tens of thousands of them are kept."""
        if self._served is None:
            return [array("d", bytes(8 * N_BINS)) for _ in of]
        of_curve = [self.classes.known(each) for each in of]
        chances = hazard.chances(self._served, x, of_curve)
        return [array("d", row.tobytes()) for row in gittins(chances, _WIDTHS_S)]

    def learned(self) -> Mapping[str, Any]:
        """See Learning.learned. Holds weights and curves to six digits, but no visits."""
        if self._served is None:
            return {}
        table = [[*of, np.round(curve, 6).tolist()] for of, curve in self.classes.table()]
        arrays = {name: np.round(array, 6).tolist() for name, array in self.net.arrays.items()}
        return {"weights": arrays, "curves": table[:_CURVES_KEPT]}

    def recall(self, learned: Mapping[str, Any]) -> None:
        """See Learning.recall."""
        if not learned:
            return
        found: dict[VisitClass, Table] = {}
        for stop, gap, service, curve in learned["curves"][:_CURVES_KEPT]:
            chances = np.array(curve, dtype=np.float64)
            if chances.shape != (N_BINS,) or not ((chances >= 0) & (chances <= 1)).all():
                raise ValueError("a curve is damaged")
            found[VisitClass(str(stop), int(gap), int(service))] = chances
        self.net.recall(learned["weights"])
        self.classes.recall(found)
        self._serve()

    def _serve(self) -> None:
        """Use the present state of the network and the classes for indices from now on."""
        self._served = self.net.inference_weights(self.classes.curves)

    def _describe(self, stage: int, row: int, of: VisitClass, x: array[float], now: float) -> None:
        self._of[stage, row] = self.classes.number(of)
        self._x[stage, row] = x
        self._since_s[stage, row] = now

    def _outcomes(
        self, stage: NDArray[np.int64], rows: NDArray[np.int64], now: float
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Per visit: the bin in which it returned, or is away now, and whether it returned."""
        back = self._back_s[rows]
        idle = np.minimum(back, now) - self._since_s[stage, rows]
        last = np.searchsorted(EDGES_S, idle, side="right") - 1
        return np.maximum(last, 0), np.isfinite(back)


bin_of = partial(bisect_right, EDGES_S[1:])
"""The bin of an idle time. Any value has one, even a negative one after a clock went back."""
