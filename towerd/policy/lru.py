"""LRU over a tree: evicts the least recently used first, children before their parents."""

from __future__ import annotations

from towerd.policy.tree import Entry, Rank, TreePolicy


class LRU(TreePolicy):
    """Evicts the leaf that was used longest ago."""

    def _rank(self, entry: Entry) -> Rank:
        return entry.used, 0.0
