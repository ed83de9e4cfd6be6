"""Lindy (Towers of Segments, section 8.3): recency, position in the tree, accumulated age.

Bases, the keys that many conversations share, are evicted last. The others are ranked by recency,
with some credit for age: lifetimes are heavy-tailed, so a key that has lived long lives longer. For
the same reason a conversation that has lived for some time is expected back until it has been idle
for as long.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import nlargest
from itertools import islice

from towerd.policy.base import Entry, Key, Policy, Rank, Tree

BASE_BRANCHES = 3
"""A key with at least this many continuations counts as a base."""
AGE_CREDIT = 0.1
"""Seconds of recency that a second of age is worth."""
_REMEMBERED_MAX = 1 << 17
_ENDS_MAX = 20_000
_WANTED_AMONG = 1024
"""Of the conversations that were used last, so many are considered."""


class Lindy(Policy):
    """Rank = (is a base, last use + credit for the time between first and last use). The first
    use and the number of continuations are remembered beyond eviction, within a bound."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self._past: OrderedDict[Key, tuple[float, int]] = OrderedDict()
        self._ends: OrderedDict[Key, tuple[float, float]] = OrderedDict()
        """Where conversations end, in the tier or not: when each began, and its last use."""

    def wanted(self, now: float, most: int) -> list[tuple[Key, float]]:
        """See ReuseForecaster.wanted. The value is the chance that the conversation continues; it is
        at least one half, and highest for what has lived long and was used just now."""
        last = islice(reversed(self._ends.items()), _WANTED_AMONG)
        chances = [
            (end, (used - born) / (max(now, used) - born))
            for end, (born, used) in last
            if used > born
        ]
        return nlargest(
            most, [each for each in chances if each[1] >= 0.5], key=lambda each: each[1]
        )

    def split(self, lower: Key, upper: Key, upper_nbytes: int, now: float) -> None:
        """See Policy.split. The next prompt mostly parts from the last one a few tokens before its
        end; the conversation then continues from the upper part."""
        nbytes = self.size_of(lower)
        if lower in self._ends and (nbytes is None or 2 * upper_nbytes >= nbytes):
            self._ends[upper] = self._ends.pop(lower)
        super().split(lower, upper, upper_nbytes, now)

    def _use(self, key: Key) -> None:
        """Use a key, at which a conversation ends now that may have ended above it before."""
        super()._use(key)
        entry = self._entries.get(key)
        born = self._now
        at: Key | None = key
        while at is not None and at in self._entries:
            before = self._ends.pop(at, None)
            born = born if before is None else min(born, before[0])
            at = self.tree.parent(at)
        if entry is not None:
            self._ends[key] = (born, self._now)
            if len(self._ends) > _ENDS_MAX:
                self._ends.popitem(last=False)

    def _rank(self, entry: Entry) -> Rank:
        is_base = entry.seq >= BASE_BRANCHES
        return float(is_base), entry.used + AGE_CREDIT * (entry.used - entry.born)

    def _on_use(self, entry: Entry, *, is_new: bool) -> None:
        if not is_new:
            return
        born, n_branches = self._past.pop(entry.key, (0.0, -1))
        if n_branches >= 0:
            entry.born = min(entry.born, born)
            entry.seq = max(entry.seq, n_branches)
        else:
            self._count_branch(entry)

    def _count_branch(self, entry: Entry) -> None:
        """Count a continuation that was never seen before for its parent."""
        above = self.tree.parent(entry.key)
        if above is not None and (parent := self._entries.get(above)) is not None:
            parent.seq += 1

    def _on_remove(self, entry: Entry) -> None:
        self._past[entry.key] = (entry.born, entry.seq)
        if len(self._past) > _REMEMBERED_MAX:
            self._past.popitem(last=False)

    def _on_split(self, lower: Entry, upper: Entry) -> None:
        upper.seq = 1
