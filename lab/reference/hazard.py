"""Probabilities of return in numpy: the specification of kernels/cpp/hazard.cpp, up to rounding.

A network with one hidden layer corrects the scores of a curve of probabilities, bin by bin
(Gensheimer and Narasimhan 2019: a discrete-time hazard model). `towerd.policy.predict.hazard`
trains it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from towerd.kernels.hazard import SCORE_MAX, HazardWeights, Table


def chances(weights: HazardWeights, x: Table, of: Sequence[int]) -> Table:
    """[n, bins]: sigmoid(logits[of] + relu(x w1 + b1) correction).

    x: float64 [n, features], contiguous; of: [n], the curve that each row starts from. ValueError
    for shapes that do not fit and for curves that do not exist."""
    check(weights, x, of)
    hidden = np.maximum(x @ weights.w1 + weights.b1, 0.0)
    scores = hidden @ weights.correction + weights.logits[np.asarray(of, np.int64)]
    found: Table = 1.0 / (1.0 + np.exp(-np.clip(scores, -SCORE_MAX, SCORE_MAX)))
    return found


def check(weights: HazardWeights, x: Table, of: Sequence[int]) -> None:
    """ValueError for arguments that `chances` does not take."""
    n_features, n_hidden = weights.w1.shape
    n_curves, n_bins = weights.logits.shape
    if weights.b1.shape != (n_hidden,) or weights.correction.shape != (n_hidden, n_bins):
        raise ValueError("weights: their shapes do not fit each other")
    if x.shape != (len(of), n_features):
        raise ValueError(f"x {x.shape}: expected {(len(of), n_features)}")
    if not all(0 <= each < n_curves for each in of):
        raise ValueError(f"of: expected numbers below {n_curves}")
