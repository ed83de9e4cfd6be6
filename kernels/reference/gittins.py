"""Gittins indices in Python: the specification of kernels/cpp/gittins.cpp.

Whoever keeps something until time H pays room for min(return, H), and wins with the probability
of a return by then. The index at a time is the best ratio over H of the two (Gittins 1979).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]
SURE = 1.0 - 1e-12
"""The most that a chance counts as: whoever surely returns leaves nothing for later bins."""


def gittins(chances: Table, widths: Table) -> Table:
    """[n, bins]: at each bin of each row the best ratio, over all horizons from its beginning, of
    the chance to return to the mean time spent. A return counts as in the middle of its bin.

    chances: float64 [n, bins], to return within a bin, given that one is away as it begins;
    widths: float64 [bins], of the bins, in any unit. ValueError for chances outside [0, 1] and
    widths that are not above 0.

    The best horizon from a bin on is that from the next one on, or ends before: so bins are
    pooled from the last one on with what follows them for as long as that raises the ratio (the
    pool-adjacent-violators algorithm), in O(bins) for a row."""
    check(chances, widths)
    spans = list(enumerate(widths.tolist()))[::-1]
    return np.array([_row(row, spans) for row in chances.tolist()]).reshape(chances.shape)


def check(chances: Table, widths: Table) -> None:
    """ValueError for what `gittins` has no answer to."""
    if chances.ndim != 2 or widths.shape != chances.shape[1:]:
        raise ValueError(f"chances {chances.shape}: expected one for each of {len(widths)} widths")
    if not ((chances >= 0.0) & (chances <= 1.0)).all():
        raise ValueError("chances: expected numbers of 0 to 1")
    if not ((widths > 0.0) & np.isfinite(widths)).all():
        raise ValueError("widths: expected numbers above 0")


def _row(chances: list[float], spans: list[tuple[int, float]]) -> list[float]:
    table = [0.0] * len(chances)
    pools: list[tuple[float, float, float]] = []
    """Of the bins that follow, the next one last: returns, time, chance to stay away."""
    for b, width in spans:
        won = min(chances[b], SURE)
        stays, spent = 1.0 - won, width - 0.5 * width * won
        while pools and pools[-1][0] * spent > won * pools[-1][1]:
            more, longer, stay = pools.pop()
            won, spent, stays = won + stays * more, spent + stays * longer, stays * stay
        pools.append((won, spent, stays))
        table[b] = won / spent
    return table
