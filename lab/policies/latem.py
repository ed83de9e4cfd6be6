"""LATEM (Stephan, Algorithm 1) for a tier: learning-augmented marking over a tree of sized keys.

A used key is marked; a phase ends when all keys are marked. In each phase a share of the evictions
follows the predicted next use, the others are arbitrary. A use of a leaf marks its ancestors, which
the printed algorithm does not do (`lab/latem` has both forms, and their cost beside the optimum).

Conversations are the messages and their keys the tokens: only a leaf can be evicted, so a key never
outlives its ancestors, and every use marks the whole path. Sizes differ and the tier counts bytes,
so there is no equal allocation, and the quota counts the keys held when the phase began. It is
checked once per call of `victims`. The arbitrary choice is the least recently used key.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable

from towerd.policy.base import Entry, Evictable, Frees, Key, Policy, Rank, Tree

EPS = (0.05, 0.6)
"""The least and the most trust; section 6.3 calls 0.1 conservative and 0.6 bold."""
ITEMS_MAX = 1 << 16
_NEW_GAP_WEIGHT = 0.3


class Trust:
    """The share eps of a phase's evictions that follow predictions; fixed when least == most.

    Section 6.3 leaves the rule open. Here a predicted victim that is requested again within its
    phase was a wrong choice and halves the share; a phase with predicted victims of which none was
    wrong raises it by half. It never leaves [least, most], so the bounds for `most` hold."""

    def __init__(self, least: float, most: float) -> None:
        if not 0 < least <= most < 1:
            raise ValueError(f"trust must lie in (0, 1), not in [{least}, {most}]")
        self.least, self.most = least, most
        self.eps = most if least == most else math.sqrt(least * most)

    def was_wrong(self) -> None:
        """A predicted victim came back too soon."""
        self.eps = max(self.least, self.eps / 2)

    def was_right(self) -> None:
        """A phase ended without a wrong prediction."""
        self.eps = min(self.most, self.eps * 1.5)

    def quota(self, n_slots: int) -> int:
        """Evictions by prediction in a phase of a cache of `n_slots`."""
        return math.ceil(self.eps * n_slots)


class InterArrival:
    """Predicts the next use of an item, in seconds or requests: the last use plus the usual gap
    between uses, newer gaps counting more. An overdue item is expected after as long again as it
    has been away; an item with a single use after the mean gap of all items; an unknown item
    never."""

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


class LatemTree(Policy):
    """Rank = (marked, predicted next use, latest first); by last use once the quota is used up."""

    walks_path = True

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self.trust = Trust(*EPS)
        self._next_use = InterArrival()
        self._phase_s = float("-inf")
        self._n_slots = 0
        self._n_predicted = 0
        self._was_wrong = False
        self._offered: set[Key] = set()
        self._gone: set[Key] = set()
        """Victims of predictions in this phase."""

    @property
    def predicts(self) -> bool:
        """Whether this phase still has quota for predicted evictions."""
        return self._n_predicted < self.trust.quota(self._n_slots)

    def _rank(self, entry: Entry) -> Rank:
        is_marked = float(entry.used >= self._phase_s)
        return is_marked, -self._next_use(entry.key) if self.predicts else entry.used

    def _on_use(self, entry: Entry, *, is_new: bool) -> None:
        self._next_use.observe(entry.key, self._now)
        if is_new and entry.key in self._gone:
            self._gone.discard(entry.key)
            self._was_wrong = True
            self.trust.was_wrong()

    def _on_remove(self, entry: Entry) -> None:
        if entry.key not in self._offered:
            return
        self._offered.discard(entry.key)
        if self.predicts:
            self._gone.add(entry.key)
            self._n_predicted += 1
            if not self.predicts:
                self._rerank()

    def victims(self, bytes_needed: int, is_evictable: Evictable, frees: Frees = None) -> list[Key]:
        """See Policy.victims. A new phase begins when every leaf is marked."""
        self._rank_leaves()
        if all(rank[0] for rank, key in self._heap if self._is_current(rank, key)):
            self._begin_phase()
        chosen = super().victims(bytes_needed, is_evictable, frees)
        self._offered = set(chosen)
        return chosen

    def _begin_phase(self) -> None:
        if self._n_predicted and not self._was_wrong:
            self.trust.was_right()
        self._phase_s = self._now
        self._n_slots = len(self._entries)
        self._n_predicted = 0
        self._was_wrong = False
        self._gone.clear()
        self._rerank()

    def _rerank(self) -> None:
        self._heap.clear()
        self._unranked.update(self._leaves)
