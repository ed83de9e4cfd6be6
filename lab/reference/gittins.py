"""Gittins indices in Python: the specification of kernels/cpp/gittins.cpp.

Keeping an item until time H costs room for min(return, H), and pays with the probability of a
return by then. The index at a time is the best ratio of gain to cost over all H (Gittins 1979).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]
SURE = 1.0 - 1e-12
"""Upper bound of a probability: a sure return would leave nothing for later bins."""


def gittins(chances: Table, widths: Table) -> Table:
    """float64 [n, bins]: for each bin of each row, the best ratio over all horizons from the bin's
    beginning of the probability of a return to the mean time spent. A return counts as in the
    middle of its bin.

    chances: float64 [n, bins], the probability of a return within a bin, given none before it;
    widths: float64 [bins], the bins' widths in any unit. ValueError for chances outside [0, 1] and
    widths that are not above 0.

    The best horizon from a bin on is that of the next bin, or ends before it. So bins are pooled
    with what follows them, from the last one on, while that raises the ratio (the
    pool-adjacent-violators algorithm), in O(bins) for a row."""
    check(chances, widths)
    spans = list(enumerate(widths.tolist()))[::-1]
    return np.array([_row(row, spans) for row in chances.tolist()]).reshape(chances.shape)


def check(chances: Table, widths: Table) -> None:
    """ValueError for arguments that `gittins` does not take."""
    if chances.ndim != 2 or widths.shape != chances.shape[1:]:
        raise ValueError(f"chances {chances.shape}: expected one for each of {len(widths)} widths")
    if not ((chances >= 0.0) & (chances <= 1.0)).all():
        raise ValueError("chances: expected numbers of 0 to 1")
    if not ((widths > 0.0) & np.isfinite(widths)).all():
        raise ValueError("widths: expected numbers above 0")


def _row(chances: list[float], spans: list[tuple[int, float]]) -> list[float]:
    table = [0.0] * len(chances)
    # (returns, time, probability of no return) of each pool of following bins, the next one last
    pools: list[tuple[float, float, float]] = []
    for b, width in spans:
        won = min(chances[b], SURE)
        stays, spent = 1.0 - won, width - 0.5 * width * won
        while pools and pools[-1][0] * spent > won * pools[-1][1]:
            more, longer, stay = pools.pop()
            won, spent, stays = won + stays * more, spent + stays * longer, stays * stay
        pools.append((won, spent, stays))
        table[b] = won / spent
    return table
