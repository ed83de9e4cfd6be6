"""Probabilities of return: a network with one hidden layer corrects the scores of a curve of
probabilities, bin by bin (Gensheimer and Narasimhan 2019: a discrete-time hazard model).

`towerd.policy.predict.hazard` trains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.kernels import _native

Table = npt.NDArray[np.float64]
SCORE_MAX = 30.0
"""Scores are clipped to plus and minus this."""


@dataclass(frozen=True, slots=True, eq=False)
class HazardWeights:
    """The weights of the network, all float64 and contiguous."""

    w1: Table
    """[features, hidden]"""
    b1: Table
    """[hidden]"""
    correction: Table
    """[hidden, bins]: the amount that a hidden unit adds to the score of a bin."""
    logits: Table
    """[curves, bins]: the scores of the curves before the correction."""


def chances(weights: HazardWeights, x: Table, of: Sequence[int]) -> Table:
    """[n, bins]: sigmoid(logits[of] + relu(x w1 + b1) correction).

    x: float64 [n, features], contiguous; of: [n], the curve that each row starts from. ValueError
    for shapes that do not fit and for curves that do not exist."""
    w = weights
    return _native.hazard_chances(w.w1, w.b1, w.correction, w.logits, x, of)
