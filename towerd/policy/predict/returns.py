"""When an idle conversation comes back: survival curves, learned online, and what they are worth.

A visit is in a class (why its answer ended, how long it was away before, how much was new in
it, and one detail more). Per class and per bin of idle time the model counts how many visits
were still away when the bin began and how many returned within it (the Kaplan-Meier estimator);
those that never returned count too. Classes with few visits lean on coarser ones. Old counts
fade.

Keeping something until time H costs the room for min(return, H) and saves its length with the
probability of a return by then. The best ratio over H is its Gittins index: returns per second
of room. What has the least is given up first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Table: TypeAlias = NDArray[np.float64]
_RATIO = 1.4
_FIRST_S = 0.5
_N_BINS = 40
EDGES_S = (0.0, *(_FIRST_S * _RATIO**i for i in range(_N_BINS - 1)))
"""Where the bins of idle time begin; the last one, from 2 days on, has no end."""
WIDTHS_S = tuple(b - a for a, b in zip(EDGES_S, EDGES_S[1:], strict=False)) + (EDGES_S[-1],)
_PRIOR_VISITS = 10.0
_PRIOR_CHANCE = 0.01
_HALVE_AT = 20_000.0
"""Visits after which all counts are halved, so that the model follows what people do now."""


class VisitClass(NamedTuple):
    """stop: why the answer ended, or before it has, "?" and why the one before did; gap, new
    and more are buckets from 1 on; 0 stands for all of them."""

    stop: str
    gap: int = 0
    new: int = 0
    more: int = 0

    def coarser(self) -> VisitClass | None:
        """The class whose visits stand in for missing ones; None: there is none."""
        if self == _ALL:
            return None
        if self.more:
            return self._replace(more=0)
        if self.new:
            return self._replace(new=0)
        return self._replace(gap=0) if self.gap else _ALL


_ALL = VisitClass("*")


def bucket(value: float | None, edges: tuple[float, ...]) -> int:
    """1: there is no value; then one for each range between the edges."""
    return 1 if value is None else 2 + bisect_right(edges, value)


class _Counts:
    """Of one class, per bin of idle time."""

    __slots__ = ("left", "returned")

    def __init__(self) -> None:
        self.returned = [0.0] * _N_BINS
        self.left = [0.0] * _N_BINS
        """Those that were last seen away, in this bin."""


class ReturnModel:
    """Learns from visits; `index` is in returns per second of room, and 0 before any data."""

    def __init__(self) -> None:
        self._counts: dict[VisitClass, _Counts] = {}
        self._index: dict[VisitClass, list[float]] = {}
        self._n_seen = 0.0

    def observe(self, of: VisitClass, idle_s: float, *, returned: bool) -> None:
        """A visit of this class returned after `idle_s`, or was given up waiting for."""
        counts = self._counts.get(of)
        if counts is None:
            counts = self._counts[of] = _Counts()
        (counts.returned if returned else counts.left)[bin_of(idle_s)] += 1.0
        self._n_seen += 1.0

    def learn(self, away: Iterable[tuple[VisitClass, float]]) -> None:
        """Make the indices anew. `away`: class and idle time of every visit that has not
        returned yet; it counts for the bins that it is through with."""
        if self._n_seen > _HALVE_AT:
            self._fade()
        waiting: dict[VisitClass, list[float]] = {}
        for of, idle_s in away:
            waiting.setdefault(of, [0.0] * _N_BINS)[bin_of(idle_s)] += 1.0
        sums = self._sums(waiting)
        # coarser ones first: what is finer leans on them
        order = sorted(sums, key=_fineness)
        chances: dict[VisitClass, Table] = {}
        for of in order:
            up = of.coarser()
            prior = _PRIOR_CHANCE if up is None else chances[up]
            returned, left = sums[of]
            at_risk = np.cumsum((returned + left)[::-1])[::-1] - left
            chances[of] = (returned + _PRIOR_VISITS * prior) / (at_risk + _PRIOR_VISITS)
        if order:
            best = gittins(np.stack([chances[of] for of in order])).tolist()
            self._index = dict(zip(order, best, strict=True))

    def index(self, of: VisitClass, idle_s: float) -> float:
        """Returns per second of room of a visit that is away for `idle_s`."""
        at: VisitClass | None = of
        while at is not None:
            found = self._index.get(at)
            if found is not None:
                return found[bin_of(idle_s)]
            at = at.coarser()
        return 0.0

    def _sums(self, waiting: dict[VisitClass, list[float]]) -> dict[VisitClass, Table]:
        """[returned or left, bin] of each class with all that is finer."""
        zeros = [0.0] * _N_BINS
        sums: dict[VisitClass, Table] = {}
        for of in self._counts.keys() | waiting.keys():
            own = self._counts.get(of)
            mine = np.array([own.returned, own.left] if own is not None else [zeros, zeros])
            mine[1] += waiting.get(of, zeros)
            at: VisitClass | None = of
            while at is not None:
                if at in sums:
                    sums[at] += mine
                else:
                    sums[at] = mine.copy()
                at = at.coarser()
        return sums

    def _fade(self) -> None:
        self._n_seen /= 2
        for counts in self._counts.values():
            counts.returned = [x / 2 for x in counts.returned]
            counts.left = [x / 2 for x in counts.left]


def bin_of(idle_s: float) -> int:
    """The bin of an idle time, which may be anything."""
    return max(0, bisect_right(EDGES_S, idle_s) - 1)


def gittins(chances: Table) -> Table:
    """chances: [classes, bins], the probability to return within a bin, given that one is away
    as it begins. For each bin the best ratio, over all horizons from its beginning, of the
    chance to return to the mean room-time spent. A return counts as in the middle of its bin."""
    shape = chances.shape
    alive, won, spent, best = np.ones(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for i in range(shape[1]):
        chance = chances[:, i, None]
        begun = slice(0, i + 1)  # those that look ahead from this bin or from an earlier one
        won[:, begun] += alive[:, begun] * chance
        spent[:, begun] += alive[:, begun] * (WIDTHS_S[i] * (1.0 - 0.5 * chance))
        np.maximum(best[:, begun], won[:, begun] / spent[:, begun], out=best[:, begun])
        alive[:, begun] *= 1.0 - chance
    return best


def _fineness(of: VisitClass) -> tuple[int, VisitClass]:
    """A key that sorts every class after those that it leans on."""
    n = 0
    up = of.coarser()
    while up is not None:
        n, up = n + 1, up.coarser()
    return n, of
