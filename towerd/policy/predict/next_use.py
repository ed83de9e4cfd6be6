"""When an item is asked for next, for LATEM: from attention mass, or from its own past.

Both are callable as latem.NextUse. Times are in the unit of `observe`: seconds, or requests.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable

ITEMS_MAX = 1 << 16
_NEW_GAP_WEIGHT = 0.3


class InterArrival:
    """Last use plus the usual gap between uses, newer gaps counting more. An item that is
    overdue is expected after as long again as it has been away; one with a single use after the
    mean gap of all; an unknown one never."""

    def __init__(self) -> None:
        self._past: OrderedDict[Hashable, tuple[float, float | None]] = OrderedDict()
        self._now = 0.0
        self._gap_sum, self._n_gaps = 0.0, 0

    def observe(self, item: Hashable, now: float) -> None:
        """`item` is used."""
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


class AttentionMass:
    """What gets a share x of the attention is asked for once in 1 / x steps (section 6.2, with
    H2O's running sums): the expected wait of an item that is drawn with that chance. A message
    gets the mass of its tokens."""

    def __init__(self, memory: float = 0.99) -> None:
        if not 0 < memory <= 1:
            raise ValueError(f"memory is {memory}, not between 0 and 1")
        self._memory = memory
        self._mass: dict[Hashable, float] = {}
        self._sum = 0.0
        self._now = 0.0

    def observe(self, weights: dict[Hashable, float], now: float) -> None:
        """One step's attention weights, at least 0; items that are not named get none."""
        self._now = max(self._now, now)
        self._sum = self._memory * self._sum + sum(weights.values())
        self._mass = {item: self._memory * mass for item, mass in self._mass.items()}
        for item, weight in weights.items():
            self._mass[item] = self._mass.get(item, 0.0) + max(0.0, weight)
        if len(self._mass) > ITEMS_MAX:
            kept = sorted(self._mass, key=lambda item: -self._mass[item])[: ITEMS_MAX // 2]
            self._mass = {item: self._mass[item] for item in kept}

    def __call__(self, item: Hashable) -> float:
        mass = self._mass.get(item, 0.0)
        if isinstance(item, int):
            mass += sum(
                m for key, m in self._mass.items() if isinstance(key, tuple) and key[0] == item
            )
        return self._now + self._sum / mass if mass > 0 else math.inf
