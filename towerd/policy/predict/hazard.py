"""A small network that corrects a curve of return probabilities from what is known of a visit.

chance[b] = sigmoid(logit(curve[b]) + (S W2 relu(W1 x + b1))[b]) is the probability that a visit
returns within bin b of idle time, given that it is away when b begins (a discrete-time hazard
model, Gensheimer and Narasimhan 2019). S interpolates linearly between knots every few bins, so
what is learned at one bin also serves its neighbours; sharp peaks are left to the curve. Trained by
Adam (Kingma and Ba 2015) on visits that returned and on visits that are still away, which count for
the bins that they have completed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from towerd.kernels.hazard import SCORE_MAX, HazardWeights

Array: TypeAlias = NDArray[np.float64]
HIDDEN = 32
_KNOT_BINS = 6
_RATE = 5e-3
_DECAY = 1e-3
"""Weight decay per unit of learning rate; biases do not decay."""
_MEAN, _SQUARE = 0.9, 0.999
DOUBT = 0.02
"""Weight, in visits per bin, of a regularizer towards the curve: in bins without visits, such as
idle times that have not occurred yet, the correction must stay small."""


class HazardNet:
    """arrays: w1 [HIDDEN, features], b1, w2 [knots, HIDDEN]; float64."""

    def __init__(self, n_features: int, n_bins: int) -> None:
        rng = np.random.default_rng(0)
        bins, knots = np.arange(n_bins), np.arange(0, n_bins + _KNOT_BINS - 1, _KNOT_BINS)
        self._lines = np.maximum(0.0, 1.0 - np.abs(bins[:, None] - knots) / _KNOT_BINS)
        """S, float64 [bins, knots]"""
        self.arrays = {
            "w1": rng.normal(0.0, (2.0 / n_features) ** 0.5, (HIDDEN, n_features)),
            "b1": np.zeros(HIDDEN),
            "w2": np.zeros((len(knots), HIDDEN)),
        }
        self._means = {name: np.zeros_like(array) for name, array in self.arrays.items()}
        self._squares = {name: np.zeros_like(array) for name, array in self.arrays.items()}
        self._n_steps = 0

    def chances(self, x: Array, curves: Array) -> Array:
        """Corrected return probabilities float64 [n, bins]. x: [n, features]; curves: [n, bins]."""
        return self._forward(x, curves)[1]

    def step(
        self, x: Array, curves: Array, last: NDArray[np.int64], returned: NDArray[np.bool_]
    ) -> None:
        """Take one step of Adam. Arguments as those of `slopes`."""
        self._n_steps += 1
        rate = _RATE * (1 - _SQUARE**self._n_steps) ** 0.5 / (1 - _MEAN**self._n_steps)
        for name, slope in self.slopes(x, curves, last, returned).items():
            mean, square, array = self._means[name], self._squares[name], self.arrays[name]
            mean += (1 - _MEAN) * (slope - mean)
            square += (1 - _SQUARE) * (slope * slope - square)
            if array.ndim > 1:
                array *= 1 - _RATE * _DECAY
            array -= rate * mean / (np.sqrt(square) + 1e-8)

    def slopes(
        self, x: Array, curves: Array, last: NDArray[np.int64], returned: NDArray[np.bool_]
    ) -> dict[str, Array]:
        """The gradient of the mean loss, by array. last: [n], the bin in which a visit returned, or
        is away now."""
        hidden, chances = self._forward(x, curves)
        bins = np.arange(chances.shape[1])
        is_last = bins == last[:, None]
        came = is_last & returned[:, None]
        error = np.where((bins < last[:, None]) | came, chances - came, 0.0)
        error = (error + DOUBT * (chances - curves)) / len(x)
        at_knots = error @ self._lines
        below = (at_knots @ self.arrays["w2"]) * (hidden > 0.0)
        return {"w1": below.T @ x, "b1": below.sum(0), "w2": at_knots.T @ hidden}

    def recall(self, arrays: Mapping[str, Any]) -> None:
        """Continue from other weights. Raises ValueError or KeyError if they do not fit."""
        found = {name: np.array(arrays[name], dtype=np.float64) for name in self.arrays}
        for name, array in found.items():
            if array.shape != self.arrays[name].shape or not np.isfinite(array).all():
                raise ValueError(f"{name} is damaged")
        self.arrays = found

    def inference_weights(self, curves: Array) -> HazardWeights:
        """The present weights over curves [classes, bins], for `kernels.hazard`, which gives the
        same probabilities up to rounding."""
        return HazardWeights(
            np.ascontiguousarray(self.arrays["w1"].T),
            self.arrays["b1"].copy(),
            np.ascontiguousarray(self.arrays["w2"].T @ self._lines.T),
            _logit(curves),
        )

    def _forward(self, x: Array, curves: Array) -> tuple[Array, Array]:
        a = self.arrays
        hidden = np.maximum(x @ a["w1"].T + a["b1"], 0.0)
        scores = hidden @ a["w2"].T @ self._lines.T + _logit(curves)
        chances: Array = 1.0 / (1.0 + np.exp(-np.clip(scores, -SCORE_MAX, SCORE_MAX)))
        return hidden, chances


def _logit(chances: Array) -> Array:
    sure = np.clip(chances, 1e-6, 1.0 - 1e-6)
    found: Array = np.log(sure / (1.0 - sure))
    return found
