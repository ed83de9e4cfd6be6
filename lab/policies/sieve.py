"""SIEVE (Zhang et al., NSDI 2024) over a tree.

There is one queue in order of insertion, and a hand that moves from the oldest key to the newest. A
key that was used since the hand last passed loses its mark and stays; others are evicted. Inner
keys are skipped.
"""

from __future__ import annotations

import heapq

from towerd.policy.base import Entry, Evictable, Frees, Key, Policy, Rank, Tree


class Sieve(Policy):
    """A rank is (lap, place in the queue): the order in which the hand will meet the leaves. A
    marked leaf that the hand passes gets the next lap; entry.weight is the mark."""

    walks_path = True

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self._hand: Rank = (0.0, 0.0)
        self._n_inserted = 0
        self._offered: dict[Key, Rank] = {}

    def _rank(self, entry: Entry) -> Rank:
        lap, place = self._hand
        return (lap if entry.seq >= place else lap + 1), entry.seq

    def _rank_after(self, parent: Entry, rank: Rank) -> Rank:
        return (rank[0] if parent.seq >= rank[1] else rank[0] + 1), parent.seq

    def _spare(self, entry: Entry, rank: Rank) -> Rank | None:
        return (rank[0] + 1, rank[1]) if entry.weight else None

    def _on_use(self, entry: Entry, *, is_new: bool) -> None:
        if is_new:
            self._n_inserted += 1
            entry.seq = self._n_inserted
        else:
            entry.weight = 1.0

    def _push(self, key: Key) -> None:
        """Rank a key immediately, because the hand must unmark every leaf that it passes."""
        super()._push(key)
        self._rank_leaves()

    def _on_split(self, lower: Entry, upper: Entry) -> None:
        upper.weight = 1.0

    def _on_remove(self, entry: Entry) -> None:
        reached = self._offered.pop(entry.key, None)
        if reached is None:
            return
        newest = next(reversed(self._entries), None)
        if newest is None or self._entries[newest].seq < entry.seq:
            reached = (reached[0] + 1, 0.0)  # nothing newer is left: the hand starts over
        self._pass_by(reached)

    def _pass_by(self, reached: Rank) -> None:
        """Move the hand to `reached` and unmark the leaves on the way."""
        self._hand = max(self._hand, reached)
        while self._heap and self._heap[0][0] < self._hand:
            rank, key = heapq.heappop(self._heap)
            if self._is_current(rank, key):
                entry = self._entries[key]
                entry.weight = 0.0
                entry.ranked = (rank[0] + 1, rank[1])
                heapq.heappush(self._heap, (entry.ranked, key))

    def victims(self, bytes_needed: int, is_evictable: Evictable, frees: Frees = None) -> list[Key]:
        """See Policy.victims. Simulates the hand's moves; only `remove` makes them."""
        offers = self._offers(bytes_needed, is_evictable, frees)
        self._offered = {entry.key: rank for rank, entry in offers}
        return list(self._offered)
