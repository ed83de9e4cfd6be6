"""Markov models of order 1 to 3 with back-off, one for each number of steps ahead.

What follows a context of n steps is estimated from what followed it before, mixed with the
estimate of the context of n - 1 steps. That estimate weighs one observation for each distinct
outcome of the longer context (Witten-Bell). Counts are kept for each distance, so that errors do
not accumulate from step to step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from towerd.policy.predict.base import END, N_STEPS, Forecast, Predictor, Share, whole

CONTEXTS_MAX = 1 << 16
"""Contexts that all tenants' models remember; beyond its share of them a model forgets the least
recently used."""
CONTEXTS_KEPT = 1 << 12
"""Contexts that all of them keep across a restart: the most recently used."""
NAMES_BYTES_KEPT = 1 << 17
"""Limit on the bytes of their names, which clients choose."""
OUTCOMES_MAX = 1 << 10
"""Distinct outcomes counted after one context."""
_Context: TypeAlias = tuple[int, tuple[str, ...]]
"""(steps ahead, the last steps)."""


class Markov:
    """A Predictor that learns online. order: the longest context, in steps."""

    def __init__(self, order: int = 3, share: Share = whole) -> None:
        if order < 1:
            raise ValueError(f"the order is {order}")
        self.order = order
        self._share = share
        self._counts: OrderedDict[_Context, dict[str, int]] = OrderedDict()

    def forecast(self, path: Sequence[str]) -> Forecast:
        """See Predictor.forecast. Empty until something was observed."""
        steps = [self._step(path, ahead) for ahead in range(1, N_STEPS + 1)]
        return steps if steps[0] else ()

    def observe(self, path: Sequence[str]) -> None:
        """See Predictor.observe."""
        for ahead in range(1, N_STEPS + 1):
            before = path[: len(path) - ahead]
            if not before:
                break
            for n in range(min(self.order, len(before)) + 1):
                self._count((ahead, tuple(before[len(before) - n :])), path[-1])

    def learned(self) -> Mapping[str, Any]:
        """See Learning.learned. Holds the most recently used contexts."""
        rows: list[list[Any]] = []
        share = self._share()
        left = int(share * NAMES_BYTES_KEPT)
        most = max(1, int(share * CONTEXTS_KEPT))
        for (ahead, names), counts in islice(reversed(self._counts.items()), most):
            taken = sum(len(name.encode()) for name in (*names, *counts))
            if taken <= left:  # contexts with too many outcomes are left out
                left -= taken
                rows.append([ahead, list(names), counts])
        return {"order": self.order, "contexts": rows[::-1]}

    def recall(self, learned: Mapping[str, Any]) -> None:
        """See Learning.recall."""
        if learned["order"] != self.order:
            raise ValueError(f"the order was {learned['order']}")
        counts: OrderedDict[_Context, dict[str, int]] = OrderedDict()
        for ahead, names, row in learned["contexts"]:
            is_sound = ahead in range(1, N_STEPS + 1) and len(names) <= self.order
            if not is_sound or not all(type(n) is int and n > 0 for n in row.values()):
                raise ValueError("a context is damaged")
            counts[int(ahead), tuple(map(str, names))] = dict(row)
        if len(counts) > CONTEXTS_MAX:
            raise ValueError(f"there are {len(counts)} contexts")
        self._counts = counts

    def _count(self, context: _Context, outcome: str) -> None:
        counts = self._counts.get(context)
        if counts is None:
            counts = self._counts[context] = {}
            while len(self._counts) > max(1, self._share() * CONTEXTS_MAX):
                self._counts.popitem(last=False)
        else:
            self._counts.move_to_end(context)
        if outcome in counts or len(counts) < OUTCOMES_MAX:
            counts[outcome] = counts.get(outcome, 0) + 1

    def _step(self, path: Sequence[str], ahead: int) -> Mapping[str, float]:
        mixed: dict[str, float] = {}
        for n in range(min(self.order, len(path)) + 1):
            counts = self._counts.get((ahead, tuple(path[len(path) - n :])))
            if counts is None:
                continue
            n_seen, n_kinds = sum(counts.values()), len(counts)
            weight = n_seen / (n_seen + n_kinds) if mixed else 1.0
            mixed = {name: (1.0 - weight) * chance for name, chance in mixed.items()}
            for name, count in counts.items():
                mixed[name] = mixed.get(name, 0.0) + weight * count / n_seen
        return mixed


def learn(predictor: Predictor, workflow: Sequence[str]) -> None:
    """Observe every step of a workflow that has ended."""
    path = [*workflow, END]
    for n in range(1, len(path) + 1):
        predictor.observe(path[:n])
