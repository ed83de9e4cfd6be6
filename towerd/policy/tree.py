"""The shared base of all policies: sizes, the tree, and a heap of the leaves.

Only a leaf, a key without children in the tier, can be evicted, so only leaves are ranked, and
only when victims are requested. A use of a key is a use of its path, but an inner key's use
time is not needed until its last child is evicted and passes it on. So an access costs
O(1), an eviction O(log n); a subclass that counts uses walks the path.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from towerd.policy.base import Key

Rank = tuple[float, float]
_COMPACT_MIN = 1024
_REBUILD_SHARE = 3
"""Pushing a leaf onto the heap costs about this many times its share of a full heapify."""
_NEVER = float("-inf")


@dataclass(slots=True)
class Entry:
    """One key. `used` and `born` are times; `weight`, `seq`, `visit` (of the last use),
    `inherited_visits` and `table` belong to the subclass."""

    key: Key
    nbytes: int
    parent: Key | None
    born: float
    used: float = _NEVER
    weight: float = 0.0
    seq: int = 0
    visit: Any = None
    inherited_visits: Any = None
    ranked: Rank = (0.0, 0.0)
    until_s: float = _NEVER
    """The rank by `table`, the table of its visit, holds until then."""
    table: Any = None


class TreePolicy:
    """A Policy except for the ranking: the leaf of the lowest rank is evicted first."""

    walks_path: ClassVar[bool] = False
    """Whether `_on_use` must be called for every key of a path."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._n_children: dict[Key, int] = {}
        """Children in the tier, by parent; the parent may be outside the tier."""
        self._leaves: dict[Key, Entry] = {}
        """The keys without children."""
        self._heap: list[tuple[Rank, Key]] = []
        """Holds every ranked leaf, and stale pairs."""
        self._unranked: set[Key] = set()
        """Leaves to rank before the next eviction; some may no longer be leaves."""
        self._is_unranked = False
        """Whether all leaves must be ranked then."""
        self._nbytes = 0
        self._now = _NEVER

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys."""
        return self._nbytes

    def size_of(self, key: Key) -> int | None:
        """Bytes of a key; None if it is unknown."""
        entry = self._entries.get(key)
        return None if entry is None else entry.nbytes

    # ---- overridden by subclasses -----------------------------------------------------------

    def _rank(self, entry: Entry) -> Rank:
        """The rank of a leaf; may only change in `_on_use` or with a new `_push`."""
        raise NotImplementedError

    def _rank_after(self, parent: Entry, rank: Rank) -> Rank:
        """The rank of a key whose last child would be evicted at `rank`."""
        return self._rank(parent)

    def _rank_each(self, entries: list[Entry]) -> list[Entry]:
        """Set `ranked` of these to `_rank`; returns those that were set. A subclass may skip
        entries whose `until_s` says that their rank still holds, and rank the rest as a batch."""
        for entry in entries:
            entry.ranked, entry.until_s = self._rank(entry), _NEVER
        return entries

    def _spare(self, entry: Entry, rank: Rank) -> Rank | None:
        """The later rank at which to evict a leaf that is due at `rank`; None: evict it now."""
        return None

    def _on_use(self, entry: Entry, *, is_new: bool) -> None:
        """`entry` is used at `self._now`; `entry.used` is still the time of the use before."""

    def _on_remove(self, entry: Entry) -> None:
        """`entry` has left the tier."""

    def _on_split(self, lower: Entry, upper: Entry) -> None:
        """`upper` is new and has copies of weight, seq, visit and times of `lower`."""

    # ---- events -----------------------------------------------------------------------------

    def insert(self, key: Key, nbytes: int, now: float, parent: Key | None) -> None:
        """See Policy.insert."""
        self._tick(now)
        entry = self._entries.get(key)
        if entry is None:
            above = None if self._would_cycle(parent, key) else parent
            self._add(Entry(key, nbytes, above, self._now))
        else:
            self._resize(entry, nbytes)
            self._move(entry, parent)
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
        self._leaves.pop(key, None)
        self._unranked.discard(key)
        self._leave(entry)
        self._on_remove(entry)

    def split(self, lower: Key, upper: Key, upper_nbytes: int, now: float) -> None:
        """See Policy.split. The lower part keeps its rank. A late split, when `upper` is in the
        tier already, only moves the bytes and the lower part."""
        entry = self._entries.get(lower)
        if entry is None or lower == upper:
            return
        is_use = now > self._now
        self._tick(now)
        self._resize(entry, max(0, entry.nbytes - upper_nbytes))
        if upper in self._entries:
            self._move(entry, upper)
        else:
            parent = None if self._would_cycle(entry.parent, upper) else entry.parent
            above = Entry(upper, upper_nbytes, parent, entry.born)
            above.weight, above.seq, above.used = entry.weight, entry.seq, entry.used
            above.visit = entry.visit
            self._add(above)
            self._link(entry, upper)
            self._on_split(entry, above)
        if is_use:
            self._use(upper)

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
            self._resize(entry, nbytes)

    def explain(self, key: Key, now: float) -> dict[str, Any]:
        """See Policy.explain. O(number of keys)."""
        entry = self._entries.get(key)
        if entry is None:
            return {}
        self._rank_leaves()
        if key in self._n_children:
            return {"score": self._rank(entry)[0], "place": None, "used": self._last_use(key)}
        leaves = {pair for pair in self._heap if self._is_current(*pair)}
        place = sum(pair < (entry.ranked, key) for pair in leaves)
        return {"score": entry.ranked[0], "place": place, "used": entry.used}

    def _last_use(self, key: Key) -> float:
        """The latest use in the subtree of an inner key."""
        below = {key}
        for other in self._entries:
            path: list[Key] = []
            at: Key | None = other
            while at is not None and at not in below and at in self._entries:
                path.append(at)
                at = self._entries[at].parent
            if at in below:
                below.update(path)
        return max(self._entries[each].used for each in below)

    def victims(self, bytes_needed: int, is_evictable: Callable[[Key], bool]) -> list[Key]:
        """See Policy.victims."""
        return [entry.key for _, entry in self._offers(bytes_needed, is_evictable)]

    def lowest(self, nbytes: int, is_evictable: Callable[[Key], bool]) -> list[Key]:
        """See Policy.lowest."""
        return [entry.key for _, entry in self._offers(nbytes, is_evictable)]

    def _offers(
        self, bytes_needed: int, is_evictable: Callable[[Key], bool]
    ) -> list[tuple[Rank, Entry]]:
        """The victims with the ranks at which they are evicted."""
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

    def copy_from(self, other: TreePolicy) -> None:
        """Become a copy of `other`, with its times and visits."""
        self._entries = {k: replace(entry, until_s=_NEVER) for k, entry in other._entries.items()}
        self._n_children = dict(other._n_children)
        self._leaves = {key: self._entries[key] for key in other._leaves}
        self._nbytes, self._now = other._nbytes, other._now
        self._heap = []
        self._is_unranked = True

    def check_integrity(self, known: Mapping[Key, tuple[Key | None, int]] | None = None) -> None:
        """See Policy.check_integrity."""
        entries, ends = self._entries, set[Key]()
        for key in entries:
            path: dict[Key, None] = {}
            at: Key | None = key
            while at is not None and at not in ends and at in entries:
                assert at not in path, f"{at} stands on itself"
                path[at] = None
                at = entries[at].parent
            ends.update(path)
        children = Counter(e.parent for e in entries.values() if e.parent is not None)
        assert self._n_children == children, "children are miscounted"
        leaves = {key: entry for key, entry in entries.items() if key not in children}
        assert self._leaves == leaves, "other keys than the leaves are listed as such"
        assert self._nbytes == sum(e.nbytes for e in entries.values()), "bytes are miscounted"
        ranked = {key for rank, key in self._heap if self._is_current(rank, key)}
        lost = leaves.keys() - ranked - self._unranked
        assert self._is_unranked or not lost, f"the leaves {lost} are never ranked"
        if known is not None:
            found = {key: (entry.parent, entry.nbytes) for key, entry in entries.items()}
            wrong = [k for k in {*found, *known} if found.get(k) != known.get(k)]
            assert not wrong, f"{wrong[0]} is {found.get(wrong[0])}, not {known.get(wrong[0])}"

    # ---- inside -----------------------------------------------------------------------------

    def _in_order(
        self, is_evictable: Callable[[Key], bool]
    ) -> Generator[tuple[Rank, Entry], None, None]:
        """Entries in the order of their eviction, with the ranks at which they are evicted. What
        is popped off the heap is queued for ranking again when the generator is closed."""
        self._rank_leaves()
        heap, taken = self._heap, list[Key]()
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
                    taken.append(key)
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
                self._inherit(parent, entry)
                gone = n_gone.get(parent.key, 0) + 1
                n_gone[parent.key] = gone
                if gone == self._n_children[parent.key]:
                    heapq.heappush(extra, (self._rank_after(parent, rank), parent.key))
        finally:
            for key in taken:
                self._push(key)

    def _is_current(self, rank: Rank, key: Key) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.ranked == rank and key not in self._n_children

    def _tick(self, now: float) -> None:
        if now > self._now:
            self._now = now

    def _add(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        if entry.key not in self._n_children:
            self._leaves[entry.key] = entry
        self._nbytes += entry.nbytes
        self._join(entry.parent)

    def _use(self, key: Key) -> None:
        """Use `key`, and its ancestors up to the first one that was already used at this time."""
        at: Key | None = key
        while at is not None:
            entry = self._entries.get(at)
            if entry is None or entry.used >= self._now:
                break
            self._on_use(entry, is_new=entry.used == _NEVER)
            entry.used = self._now
            if not self.walks_path:
                break
            at = entry.parent
        self._push(key)

    def _push_leaves(self) -> None:
        """Queue all leaves for ranking, except those whose rank still holds."""
        self._is_unranked = True

    def _push(self, key: Key) -> None:
        """Queue `key` for ranking, if it is a leaf."""
        self._unranked.add(key)

    def _rank_leaves(self) -> None:
        """Rank the queued leaves and put them on the heap: one by one, or by rebuilding the heap
        when they are a large part of it."""
        leaves, heap = self._leaves, self._heap
        waiting = [leaves[key] for key in self._unranked if key in leaves]
        self._unranked.clear()
        for entry in waiting:
            entry.until_s = _NEVER
        if self._is_unranked:
            waiting = list(leaves.values())
        self._is_unranked = False
        ranked = self._rank_each(waiting)
        if _REBUILD_SHARE * len(ranked) > len(leaves):
            heap[:] = [(entry.ranked, entry.key) for entry in leaves.values()]
            heapq.heapify(heap)
        else:
            for entry in ranked:
                heapq.heappush(heap, (entry.ranked, entry.key))
        if len(self._heap) > _COMPACT_MIN + 4 * len(self._entries):
            self._heap = [pair for pair in set(self._heap) if self._is_current(*pair)]
            heapq.heapify(self._heap)

    def _would_cycle(self, key: Key | None, below: Key) -> bool:
        """Whether `below` is `key` or one of its ancestors, so that `key` cannot be its parent."""
        if key != below and below not in self._n_children:
            return False
        while key is not None and key != below:
            entry = self._entries.get(key)
            key = None if entry is None else entry.parent
        return key is not None

    def _move(self, entry: Entry, parent: Key | None) -> None:
        """Change the parent of a key, unless that would close a cycle."""
        if entry.parent != parent and not self._would_cycle(parent, entry.key):
            self._link(entry, parent)

    def _link(self, entry: Entry, parent: Key | None) -> None:
        if entry.parent != parent:
            self._leave(entry)
            entry.parent = parent
            self._join(parent)

    def _resize(self, entry: Entry, nbytes: int) -> None:
        self._nbytes += nbytes - entry.nbytes
        entry.nbytes = nbytes

    def _join(self, parent: Key | None) -> None:
        if parent is not None:
            self._n_children[parent] = self._n_children.get(parent, 0) + 1
            self._leaves.pop(parent, None)

    def _leave(self, child: Entry) -> None:
        """`child` is no longer below its parent."""
        if child.parent is None:
            return
        parent = self._entries.get(child.parent)
        if parent is not None:
            self._inherit(parent, child)
        left = self._n_children[child.parent] - 1
        if left:
            self._n_children[child.parent] = left
        else:
            del self._n_children[child.parent]
            if parent is not None:
                self._leaves[child.parent] = parent
                self._push(child.parent)

    def _inherit(self, parent: Entry, child: Entry) -> None:
        """A use of a child counts as a use of its parent."""
        if child.used > parent.used:
            parent.used = child.used
            parent.visit = child.visit
