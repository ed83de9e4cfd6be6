"""foresight: keep what is expected back soonest for the room it takes, guarded by LRU.

Every leaf is ranked by the Gittins index of its last visit (see `predict.returns`). Forecasts
can be wrong for a workload, so two shadow caches of the same capacity, which hold nothing but
sizes, play pure forecast and pure LRU on the same events. The real cache follows whichever found
more bytes lately.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from towerd.policy.base import Key
from towerd.policy.lru import LRU
from towerd.policy.tree import Entry, Rank, TreePolicy
from towerd.policy.visits import Visit, Visits

_RERANK_EVERY = 16
"""Visits after which all leaves are ranked anew: indices change as time goes by."""
_MEMORY = 0.998
"""Weight of the past at each request in the comparison of the shadows."""
_MARGIN = 0.002
"""Share of the bytes by which one shadow must lead before the real cache changes sides."""


class Forecast(TreePolicy):
    """Ranks by expected return alone. Several caches can share one record of visits."""

    def __init__(self, visits: Visits) -> None:
        super().__init__()
        self.visits = visits
        self._of: dict[Key, Visit] = {}

    def _rank(self, entry: Entry) -> Rank:
        return self.visits.index(self._of[entry.key], self._now), entry.used

    def _on_use(self, entry: Entry, *, is_new: bool) -> None:
        self._of[entry.key] = self.visits.current

    def _on_remove(self, entry: Entry) -> None:
        del self._of[entry.key]

    def _on_split(self, lower: Entry, upper: Entry) -> None:
        self._of[upper.key] = self._of[lower.key]

    def rerank(self, now: float) -> None:
        """Rank every leaf as of `now`."""
        self._tick(now)
        leaves = {key for rank, key in self._heap if self._is_current(rank, key)}
        self._heap = []
        for key in leaves:
            entry = self._entries[key]
            entry.ranked = self._rank(entry)
            self._heap.append((entry.ranked, key))
        heapq.heapify(self._heap)

    def refresh(self, key: Key, now: float) -> None:
        """Rank one key anew after news about its visit."""
        self._tick(now)
        if key in self._entries:
            self._push(key)


class Foresight(Forecast):
    """The policy. `trusts` tells which side it is on."""

    def __init__(self) -> None:
        super().__init__(Visits())
        self.trusts = True
        self._lru = LRU()
        self._pure = Forecast(self.visits)
        self._lead = 0.0
        """Bytes that pure forecast found and LRU did not, less the reverse; old ones fade."""
        self._seen = 0.0
        self._n_visits = 0
        self._room: int | None = None
        """Bytes that were to stay at the last eviction; None: there was none."""

    def _rank(self, entry: Entry) -> Rank:
        if self.trusts:
            return super()._rank(entry)
        ended = self._of[entry.key].ended
        return (-1.0 if ended else 0.0), entry.used

    def _on_use(self, entry: Entry, *, is_new: bool) -> None:
        if self._now > self.visits.current.start_s:
            self._begin_visit()
        self.visits.use(entry.key, entry.nbytes, self._now)
        super()._on_use(entry, is_new=is_new)
        self._seen += entry.nbytes
        if entry.key in self._pure:
            self._lead += entry.nbytes
        if entry.key in self._lru:
            self._lead -= entry.nbytes
        for shadow in (self._pure, self._lru):
            if entry.key in shadow:
                shadow.access(entry.key, self._now)
            else:
                shadow.insert(entry.key, entry.nbytes, self._now, entry.parent)

    def _on_remove(self, entry: Entry) -> None:
        super()._on_remove(entry)
        if self._room is None:
            self._pure.remove(entry.key)
            self._lru.remove(entry.key)

    def _use(self, key: Key) -> None:
        super()._use(key)
        if key in self._entries:
            self.visits.set_tip(key)

    def split(self, lower: Key, upper: Key, upper_nbytes: int, now: float) -> None:
        """See Policy.split."""
        if lower in self._entries:
            more = 2 * upper_nbytes >= self._entries[lower].nbytes
            self.visits.split(lower, upper, upper_is_more=more)
            self._pure.split(lower, upper, upper_nbytes, now)
            self._lru.split(lower, upper, upper_nbytes, now)
        super().split(lower, upper, upper_nbytes, now)

    def answered(self, key: Key, now: float, stop: str) -> None:
        """See Policy.answered."""
        self.visits.answered(key, now, stop)
        self.refresh(key, now)
        self._pure.refresh(key, now)

    def ended(self, key: Key, now: float) -> None:
        """See Policy.ended."""
        self.visits.ended(key)
        self.refresh(key, now)
        self._pure.refresh(key, now)

    def resize(self, key: Key, nbytes: int) -> None:
        """See Policy.resize."""
        super().resize(key, nbytes)
        self._pure.resize(key, nbytes)
        self._lru.resize(key, nbytes)

    def explain(self, key: Key, now: float) -> dict[str, Any]:
        """See Policy.explain. `trusts`: whether forecasts lead, or the last use does."""
        found = super().explain(key, now)
        if found:
            visit = self._of[key]
            found |= {
                "trusts": self.trusts,
                "returns_per_s": self.visits.index(visit, now),
                "turn": visit.turn,
                "stop": visit.stop,
                "away_s": max(0.0, now - visit.start_s),
                "ended": visit.ended,
            }
        return found

    def victims(self, bytes_needed: int, is_evictable: Callable[[Key], bool]) -> list[Key]:
        """See Policy.victims. Tells the shadows how much room there is."""
        self._room = max(0, self.nbytes - max(0, bytes_needed))
        return super().victims(bytes_needed, is_evictable)

    def _begin_visit(self) -> None:
        """Before a new visit uses anything: the shadows make room, and the better one leads."""
        if self._room is not None:
            for shadow in (self._pure, self._lru):
                for key in shadow.victims(shadow.nbytes - self._room, _always):
                    shadow.remove(key)
        self._lead *= _MEMORY
        self._seen *= _MEMORY
        margin = _MARGIN * self._seen
        changes = self._lead < -margin if self.trusts else self._lead > margin
        self.trusts = self.trusts != changes
        self._n_visits += 1
        if changes or self._n_visits % _RERANK_EVERY == 0:
            self.rerank(self._now)
            self._pure.rerank(self._now)


def _always(_: Key) -> bool:
    return True
