"""Lindy (Towers of Segments, section 8.3): recency, position in the tree, accumulated age.

Bases, the keys that many conversations share, are evicted last. The others are ranked by recency,
with some credit for age: lifetimes are heavy-tailed, so a key that has lived long lives longer.
"""

from __future__ import annotations

from collections import OrderedDict

from towerd.policy.base import Key
from towerd.policy.tree import Entry, Rank, TreePolicy

BASE_BRANCHES = 3
"""A key with at least this many continuations counts as a base."""
AGE_CREDIT = 0.1
"""Seconds of recency that a second of age is worth."""
_REMEMBERED_MAX = 1 << 17


class Lindy(TreePolicy):
    """Rank = (is a base, last use + credit for the time between first and last use). The first
    use and the number of continuations are remembered beyond eviction, within a bound."""

    def __init__(self) -> None:
        super().__init__()
        self._past: OrderedDict[Key, tuple[float, int]] = OrderedDict()

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
        parent = self._entries.get(entry.parent) if entry.parent is not None else None
        if parent is not None:
            parent.seq += 1

    def _on_remove(self, entry: Entry) -> None:
        self._past[entry.key] = (entry.born, entry.seq)
        if len(self._past) > _REMEMBERED_MAX:
            self._past.popitem(last=False)

    def _on_split(self, lower: Entry, upper: Entry) -> None:
        upper.seq = 1
