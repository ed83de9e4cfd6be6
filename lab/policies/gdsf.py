"""GDSF: Greedy-Dual-Size-Frequency (Cherkasova 1998) over a tree.

The value of a key is its uses per byte plus the value of the last evicted key (the "age" of the
cache): small and often used keys stay longer, and old popularity fades.
"""

from __future__ import annotations

from towerd.policy.base import Entry, Evictable, Frees, Key, Policy, Rank, Tree

_MEAN_WEIGHT = 0.01


class GDSF(Policy):
    """Rank = age + uses * (mean size / size). Sizes are in units of the mean size, so that ranks do
    not depend on the bytes per token."""

    walks_path = True

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self._age = 0.0
        self._mean_nbytes = 0.0
        self._offered: dict[Key, Rank] = {}

    def _rank(self, entry: Entry) -> Rank:
        return entry.weight, entry.used

    def _on_use(self, entry: Entry, *, is_new: bool) -> None:
        if is_new:
            step = _MEAN_WEIGHT if self._mean_nbytes else 1.0
            self._mean_nbytes += step * (entry.nbytes - self._mean_nbytes)
        entry.seq += 1
        entry.weight = self._age + entry.seq * self._mean_nbytes / max(1, entry.nbytes)

    def _on_remove(self, entry: Entry) -> None:
        if entry.key in self._offered:
            self._age = max(self._age, self._offered.pop(entry.key)[0])

    def victims(self, bytes_needed: int, is_evictable: Evictable, frees: Frees = None) -> list[Key]:
        """See Policy.victims."""
        offers = self._offers(bytes_needed, is_evictable, frees)
        self._offered = {entry.key: rank for rank, entry in offers}
        return list(self._offered)
