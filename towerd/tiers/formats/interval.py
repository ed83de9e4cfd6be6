"""The mean of a measurement and its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_Z = 1.959964
"""The 97.5 % quantile of the normal distribution."""


def interval(means: Sequence[float]) -> tuple[float, float]:
    """The mean of independent clusters' means, and the half-width of its 95 % interval.

    Tokens of one continuation are correlated, so each continuation is one cluster, and only the
    spread between clusters determines the interval. It is infinite for a single cluster."""
    n = len(means)
    if n < 2:
        return float(np.mean(means)), math.inf
    error = float(np.std(means, ddof=1)) / math.sqrt(n)
    return float(np.mean(means)), t_quantile(n - 1) * error


def t_quantile(df: int) -> float:
    """The 97.5 % quantile of Student's t (Abramowitz and Stegun 26.7.5).

    Accurate to 1 % from three degrees of freedom on; too small for fewer."""
    z = _Z
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * df**4)
    )
