"""Predicts the next use of an item from its past, for LATEM. Times are in seconds or requests."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable

ITEMS_MAX = 1 << 16
_NEW_GAP_WEIGHT = 0.3


class InterArrival:
    """Predicts the last use plus the usual gap between uses, newer gaps counting more. An overdue
    item is expected after as long again as it has been away; an item with a single use after the
    mean gap of all items; an unknown item never."""

    def __init__(self) -> None:
        self._past: OrderedDict[Hashable, tuple[float, float | None]] = OrderedDict()
        self._now = 0.0
        self._gap_sum, self._n_gaps = 0.0, 0

    def observe(self, item: Hashable, now: float) -> None:
        """Record a use of `item`."""
        self._now = max(self._now, now)
        last, usual = self._past.pop(item, (None, None))
        if last is not None:
            gap = max(0.0, now - last)
            self._gap_sum, self._n_gaps = self._gap_sum + gap, self._n_gaps + 1
            usual = gap if usual is None else usual + _NEW_GAP_WEIGHT * (gap - usual)
        self._past[item] = (self._now, usual)
        if len(self._past) > ITEMS_MAX:
            self._past.popitem(last=False)

    def __call__(self, item: Hashable) -> float:
        found = self._past.get(item)
        if found is None:
            return math.inf
        last, usual = found
        if usual is None:
            usual = self._gap_sum / self._n_gaps if self._n_gaps else math.inf
        return last + usual if last + usual >= self._now else 2 * self._now - last
