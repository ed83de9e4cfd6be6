"""What all policies share: sizes, the tree, and a heap of the leaves.

Only a leaf, a key without children in the tier, can be given up, so only leaves are ranked. A
subclass says how (`_rank`, `_on_use`); a use costs one step per key of the path that was not
used at this very time, an eviction O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from towerd.policy.base import Key

Rank = tuple[float, float]
_COMPACT_MIN = 1024


@dataclass(slots=True)
class Entry:
    """One key. `used` and `born` are times; `weight` and `seq` are the subclass's."""

    key: Key
    nbytes: int
    parent: Key | None
    born: float
    used: float = float("-inf")
    weight: float = 0.0
    seq: int = 0
    ranked: Rank = (0.0, 0.0)


class TreePolicy:
    """A Policy but for the ranking: the leaf of the least rank goes first."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._n_children: dict[Key, int] = {}
        """Children in the tier of any key, in the tier or not."""
        self._heap: list[tuple[Rank, Key]] = []
        """Holds every leaf with its rank, and stale pairs."""
        self._nbytes = 0
        self._now = float("-inf")

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys."""
        return self._nbytes

    # ---- what a subclass says ---------------------------------------------------------------

    def _rank(self, entry: Entry) -> Rank:
        """Its place among the leaves; must only change in `_on_use` or with a new `_push`."""
        raise NotImplementedError

    def _rank_after(self, parent: Entry, rank: Rank) -> Rank:
        """The rank of a key whose last child would go at `rank`."""
        return self._rank(parent)

    def _spare(self, entry: Entry, rank: Rank) -> Rank | None:
        """The later rank at which a leaf met at `rank` would go after all, or None: now."""
        return None

    def _on_use(self, entry: Entry, *, is_new: bool) -> None:
        """`entry` is used at `self._now`; entry.used is still the time before."""

    def _on_remove(self, entry: Entry) -> None:
        """`entry` has left."""

    # ---- events -----------------------------------------------------------------------------

    def insert(self, key: Key, nbytes: int, now: float, parent: Key | None) -> None:
        """See Policy.insert."""
        self._tick(now)
        entry = self._entries.get(key)
        if entry is None:
            self._add(Entry(key, nbytes, parent, self._now))
        else:
            self._nbytes += nbytes - entry.nbytes
            entry.nbytes = nbytes
            if entry.parent != parent:
                self._leave(entry.parent)
                entry.parent = parent
                self._join(parent)
        self._use(key)

    def access(self, key: Key, now: float) -> None:
        """See Policy.access."""
        self._tick(now)
        self._use(key)

    def remove(self, key: Key) -> None:
        """See Policy.remove."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._nbytes -= entry.nbytes
        self._leave(entry.parent)
        self._on_remove(entry)

    def split(self, lower: Key, upper: Key, upper_nbytes: int, now: float) -> None:
        """See Policy.split. A split happens when a new path runs through the upper part, so
        that part counts as used; the lower one keeps its place."""
        entry = self._entries.get(lower)
        if entry is None:
            return
        self._tick(now)
        entry.nbytes -= upper_nbytes
        above = Entry(upper, upper_nbytes, entry.parent, entry.born)
        above.weight, above.seq, above.used = entry.weight, entry.seq, entry.used
        self._nbytes -= upper_nbytes
        self._leave(entry.parent)
        entry.parent = upper
        self._join(upper)
        self._add(above)
        self._on_split(entry, above)
        self._use(upper)

    def _on_split(self, lower: Entry, upper: Entry) -> None:
        """`upper` is new and has copies of weight, seq and times of `lower`."""

    def answered(self, key: Key, now: float, stop: str) -> None:
        """See Policy.answered."""

    def ended(self, key: Key, now: float) -> None:
        """See Policy.ended."""

    def stepped(self, key: Key, now: float, workflow: str, agent: str) -> None:
        """See Policy.stepped."""

    def workflow_ended(self, workflow: str, now: float) -> None:
        """See Policy.workflow_ended."""

    def resize(self, key: Key, nbytes: int) -> None:
        """See Policy.resize."""
        entry = self._entries.get(key)
        if entry is not None:
            self._nbytes += nbytes - entry.nbytes
            entry.nbytes = nbytes

    def explain(self, key: Key, now: float) -> dict[str, Any]:
        """See Policy.explain. Looks at every leaf."""
        entry = self._entries.get(key)
        if entry is None:
            return {}
        place = None
        if key not in self._n_children:
            leaves = {pair for pair in self._heap if self._is_current(*pair)}
            place = sum(pair < (entry.ranked, key) for pair in leaves)
        return {"score": entry.ranked[0], "place": place, "used": entry.used}

    def victims(self, bytes_needed: int, is_evictable: Callable[[Key], bool]) -> list[Key]:
        """See Policy.victims."""
        return [entry.key for _, entry in self._offers(bytes_needed, is_evictable)]

    def _offers(
        self, bytes_needed: int, is_evictable: Callable[[Key], bool]
    ) -> list[tuple[Rank, Entry]]:
        """The victims with the ranks at which they go."""
        offers: list[tuple[Rank, Entry]] = []
        freed = 0
        order = self._in_order(is_evictable)
        while freed < bytes_needed:
            offer = next(order, None)
            if offer is None:
                break
            offers.append(offer)
            freed += offer[1].nbytes
        order.close()
        return offers

    # ---- inside -----------------------------------------------------------------------------

    def _in_order(
        self, is_evictable: Callable[[Key], bool]
    ) -> Generator[tuple[Rank, Entry], None, None]:
        """Entries to give up one after the other, with the ranks at which they go. Whatever is
        taken off the heap returns to it when the generator is closed."""
        heap, taken = self._heap, list[tuple[Rank, Key]]()
        extra: list[tuple[Rank, Key]] = []
        met: set[Key] = set()
        n_gone: dict[Key, int] = {}
        try:
            while heap or extra:
                if not heap or (extra and extra[0] < heap[0]):
                    rank, key = heapq.heappop(extra)
                else:
                    rank, key = heapq.heappop(heap)
                    if key in met or not self._is_current(rank, key):
                        continue
                    taken.append((rank, key))
                entry = self._entries[key]
                if not is_evictable(key):
                    met.add(key)
                    continue
                later = self._spare(entry, rank) if key not in met else None
                met.add(key)
                if later is not None:
                    heapq.heappush(extra, (later, key))
                    continue
                yield rank, entry
                parent = self._entries.get(entry.parent) if entry.parent is not None else None
                if parent is None:
                    continue
                n_gone[parent.key] = n_gone.get(parent.key, 0) + 1
                if n_gone[parent.key] == self._n_children[parent.key]:
                    heapq.heappush(extra, (self._rank_after(parent, rank), parent.key))
        finally:
            for pair in taken:
                heapq.heappush(heap, pair)

    def _is_current(self, rank: Rank, key: Key) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.ranked == rank and key not in self._n_children

    def _tick(self, now: float) -> None:
        self._now = max(self._now, now)

    def _add(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self._nbytes += entry.nbytes
        self._join(entry.parent)

    def _use(self, key: Key) -> None:
        """Use `key` and its path up to the first that was used at this time already."""
        at: Key | None = key
        while at is not None:
            entry = self._entries.get(at)
            if entry is None or entry.used >= self._now:
                break
            self._on_use(entry, is_new=entry.used == float("-inf"))
            entry.used = self._now
            at = entry.parent
        self._push(key)

    def _push(self, key: Key) -> None:
        """Rank `key` anew if it is a leaf."""
        entry = self._entries.get(key)
        if entry is None or key in self._n_children:
            return
        entry.ranked = self._rank(entry)
        heapq.heappush(self._heap, (entry.ranked, key))
        if len(self._heap) > _COMPACT_MIN + 4 * len(self._entries):
            pairs = {pair for pair in self._heap if self._is_current(*pair)}
            self._heap = list(pairs)
            heapq.heapify(self._heap)

    def _join(self, parent: Key | None) -> None:
        if parent is not None:
            self._n_children[parent] = self._n_children.get(parent, 0) + 1

    def _leave(self, parent: Key | None) -> None:
        if parent is None:
            return
        left = self._n_children[parent] - 1
        if left:
            self._n_children[parent] = left
        else:
            del self._n_children[parent]
            self._push(parent)
