"""When an idle conversation comes back: survival curves, learned online, and what they are worth.

A visit is in a class (why its answer ended, how long it was away before, its turn, its length).
Per class and per bin of idle time the model counts how many visits were still away when the bin
began and how many returned within it (the Kaplan-Meier estimator); those that never returned
count too. Classes with few visits lean on coarser ones. Old counts fade.

Keeping something until time H costs the room for min(return, H) and saves its length with the
probability of a return by then. The best ratio over H is its Gittins index: returns per second
of room. What has the least is given up first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

_RATIO = 1.4
_FIRST_S = 0.5
_N_BINS = 40
EDGES_S = (0.0, *(_FIRST_S * _RATIO**i for i in range(_N_BINS - 1)))
"""Where the bins of idle time begin; the last one, from 2 days on, has no end."""
_WIDTHS_S = tuple(b - a for a, b in zip(EDGES_S, EDGES_S[1:], strict=False)) + (EDGES_S[-1],)
_PRIOR_VISITS = 10.0
_HALVE_AT = 20_000.0
"""Visits after which all counts are halved, so that the model follows what people do now."""
_GAP_EDGES_S = (8.0, 15.0, 40.0, 200.0)
_TURN_EDGES = (1, 4)


class VisitClass(NamedTuple):
    """stop: "?" before the answer has ended; gap, turn and length are buckets, 0 the least."""

    stop: str
    gap: int
    turn: int
    length: int

    def coarser(self) -> VisitClass | None:
        """The class whose visits stand in for missing ones; None: there is none."""
        if self.length or self.turn:
            return VisitClass(self.stop, self.gap, 0, 0)
        if self.gap:
            return VisitClass(self.stop, 0, 0, 0)
        return None


_ALL = VisitClass("*", 0, 0, 0)


def gap_bucket(gap_s: float | None) -> int:
    """The bucket of the last time away; None: never was."""
    return 0 if gap_s is None else 1 + bisect_right(_GAP_EDGES_S, gap_s)


def turn_bucket(turn: int) -> int:
    """1 on: first, early and late visits of a conversation."""
    return 1 + bisect_right(_TURN_EDGES, turn)


class _Curve:
    """Counts per bin of one class."""

    __slots__ = ("at_risk", "returned")

    def __init__(self) -> None:
        self.at_risk = [0.0] * _N_BINS
        self.returned = [0.0] * _N_BINS


class ReturnModel:
    """Learns from visits; `index` is in returns per second of room, and 0 before any data."""

    def __init__(self) -> None:
        self._curves: dict[VisitClass, _Curve] = {}
        self._index: dict[VisitClass, list[float]] = {}
        self._n_seen = 0.0

    def observe(self, of: VisitClass, from_s: float, idle_s: float, *, returned: bool) -> None:
        """A visit of this class was away from idle time `from_s`, when it entered the class, to
        `idle_s`, when it returned (or was last seen away)."""
        first, last = bin_of(from_s), bin_of(idle_s)
        for each in _lineage(of):
            curve = self._curves.get(each)
            if curve is None:
                curve = self._curves[each] = _Curve()
            for i in range(first, last + returned):
                curve.at_risk[i] += 1.0
            if returned:
                curve.returned[last] += 1.0
        self._n_seen += 1.0

    def learn(self, away: Iterable[tuple[VisitClass, float, float]]) -> None:
        """Make the indices anew. `away`: class, `from_s` and idle time of every visit that has
        not returned yet; it counts for the bins that it is through with."""
        if self._n_seen > _HALVE_AT:
            self._fade()
        extra = _at_risk(away)
        self._index = {}
        chances: dict[VisitClass, list[float]] = {}
        # coarser ones first: they have 0 where the finer ones do not
        for each in sorted({*self._curves, *extra}, key=_fineness):
            prior = _prior(each, chances)
            chances[each] = self._chances(each, extra.get(each), prior)
            self._index[each] = gittins(chances[each])

    def index(self, of: VisitClass, idle_s: float) -> float:
        """Returns per second of room of a visit that is away for `idle_s`."""
        at: VisitClass | None = of
        while at is not None:
            found = self._index.get(at)
            if found is not None:
                return found[bin_of(idle_s)]
            at = at.coarser()
        found = self._index.get(_ALL)
        return found[bin_of(idle_s)] if found is not None else 0.0

    def _chances(
        self, of: VisitClass, extra: list[float] | None, prior: list[float]
    ) -> list[float]:
        """The probability per bin to return within it, given that one is away as it begins."""
        curve = self._curves.get(of) or _Curve()
        out: list[float] = []
        for i in range(_N_BINS):
            n = curve.at_risk[i] + (extra[i] if extra is not None else 0.0)
            out.append((curve.returned[i] + _PRIOR_VISITS * prior[i]) / (n + _PRIOR_VISITS))
        return out

    def _fade(self) -> None:
        self._n_seen /= 2
        for curve in self._curves.values():
            curve.at_risk = [x / 2 for x in curve.at_risk]
            curve.returned = [x / 2 for x in curve.returned]


def bin_of(idle_s: float) -> int:
    """The bin of an idle time, which may be anything."""
    return max(0, bisect_right(EDGES_S, idle_s) - 1)


def gittins(chances: list[float]) -> list[float]:
    """For each bin the best ratio, over all horizons from its beginning, of the chance to return
    to the mean room-time spent. A return counts as in the middle of its bin."""
    best: list[float] = []
    for first in range(len(chances)):
        alive, won, spent, top = 1.0, 0.0, 0.0, 0.0
        for i in range(first, len(chances)):
            won += alive * chances[i]
            spent += alive * _WIDTHS_S[i] * (1.0 - 0.5 * chances[i])
            top = max(top, won / spent)
            alive *= 1.0 - chances[i]
        best.append(top)
    return best


def _lineage(of: VisitClass) -> list[VisitClass]:
    """The class, its coarser ones, and that of all visits."""
    out = [of]
    while (up := out[-1].coarser()) is not None:
        out.append(up)
    return [*out, _ALL]


def _at_risk(away: Iterable[tuple[VisitClass, float, float]]) -> dict[VisitClass, list[float]]:
    """How many of the visits that are away have been through each bin, by class and coarser."""
    steps: dict[VisitClass, list[float]] = {}
    for of, from_s, idle_s in away:
        first, last = bin_of(from_s), bin_of(idle_s)
        if first < last:
            mine = steps.setdefault(of, [0.0] * _N_BINS)
            mine[first] += 1.0
            mine[last] -= 1.0
    counts: dict[VisitClass, list[float]] = {}
    for of, changes in steps.items():
        through = list(accumulate(changes))
        for each in _lineage(of):
            sums = counts.setdefault(each, [0.0] * _N_BINS)
            for i, n in enumerate(through):
                sums[i] += n
    return counts


def _fineness(of: VisitClass) -> tuple[int, VisitClass]:
    return (0 if of == _ALL else len(_lineage(of))), of


def _prior(of: VisitClass, chances: dict[VisitClass, list[float]]) -> list[float]:
    for each in _lineage(of)[1:]:
        if each in chances and each != of:
            return chances[each]
    return [0.01] * _N_BINS
