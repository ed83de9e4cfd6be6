"""Eviction policies: what every one of them does, and the tree that they read.

A policy sees keys (node ids), sizes and times, never tokens or rows, so the daemon and a trace
replayer run the same code over their trees. It does no I/O and reads no clock.

Only a leaf, a key without children in the tier, can be evicted, so only leaves are ranked, and only
when victims are requested. What a leaf is, the tree says when it matters. A use of a key is a use of
its path, but an inner key's use time is not needed until its last child is evicted and passes it on.
So an access costs O(1), an eviction O(log n); a subclass that counts uses walks the path.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

Key: TypeAlias = int
Rank: TypeAlias = tuple[float, float]
Evictable: TypeAlias = Callable[[Key], bool]
Frees: TypeAlias = Callable[[Key], int] | None
"""The bytes that the eviction of a key frees after that of the keys before it, for which it was
called; None: the key's own."""
_COMPACT_MIN = 1024
_REBUILD_SHARE = 3
"""Pushing a leaf onto the heap costs about this many times its share of a full heapify."""
_NEVER = float("-inf")


class Tree(Protocol):
    """The prefix tree as policies read it, whatever tier its nodes are in. It may have changed
    since the event that a policy is told of; then it says what is now."""

    def parent(self, key: Key) -> Key | None:
        """The node above; None for the first of a path and for a node that is unknown."""
        ...

    def children(self, key: Key) -> Iterable[Key]:
        """The nodes right below, the newest first."""
        ...


@dataclass(slots=True)
class Entry:
    """One key. `used` and `born` are times; `weight`, `seq`, `visit` (of the last use),
    `inherited_visits` and `table` belong to the subclass."""

    key: Key
    nbytes: int
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


class Policy:
    """Chooses what to evict from one tier: the leaf of the lowest rank first. It is made for one Tree,
    of which some keys are in the tier: a node is useless without its ancestors, so a parent is never
    chosen before those of its children that are in the policy.

    Times need not be exact; a time earlier than the latest one seen counts as the latest one.
    Several uses of a key at the same time count as one."""

    walks_path: ClassVar[bool] = False
    """Whether `_on_use` must be called for every key of a path."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._entries: dict[Key, Entry] = {}
        self._child: dict[Key, Key] = {}
        """By key: the child in the tier that was met last. It may have left, or the tree may have
        changed."""
        self._leaves: dict[Key, Entry] = {}
        """Every leaf, and keys that have got a child by a split since."""
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

    def insert(self, key: Key, nbytes: int, now: float) -> None:
        """`key` is in the tier from now on. Counts as an access. If it is in the tier already, its
        size changes."""
        self._tick(now)
        entry = self._entries.get(key)
        if entry is None:
            self._add(Entry(key, nbytes, self._now))
        else:
            self._resize(entry, nbytes)
        self._use(key)

    def access(self, key: Key, now: float) -> None:
        """`key` and all its ancestors were used. Unknown keys are ignored."""
        self._tick(now)
        self._use(key)

    def remove(self, key: Key) -> None:
        """`key` left the tier. Unknown keys are ignored."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._nbytes -= entry.nbytes
        self._leaves.pop(key, None)
        self._unranked.discard(key)
        self._child.pop(key, None)
        above = self._above(key)
        if above is not None:
            self._inherit(above, entry)
            if self._is_leaf(above.key):
                self._leaves[above.key] = above
                self._push(above.key)
        self._on_remove(entry)

    def forget(self, key: Key) -> None:
        """`key` leaves the tree, and with it the tier."""
        self.remove(key)

    def split(self, lower: Key, upper: Key, upper_nbytes: int, now: float) -> None:
        """`upper` took the first `upper_nbytes` of `lower`, and is its parent. Counts as an access
        of `upper` if `now` is later than every earlier time. Ignored if `lower` is unknown. The
        lower part keeps its rank; if `upper` is in the tier already, only the bytes move."""
        entry = self._entries.get(lower)
        if entry is None:
            return
        is_use = now > self._now
        self._tick(now)
        self._resize(entry, max(0, entry.nbytes - upper_nbytes))
        if upper not in self._entries:
            above = Entry(upper, upper_nbytes, entry.born)
            above.weight, above.seq, above.used = entry.weight, entry.seq, entry.used
            above.visit = entry.visit
            self._add(above)
            self._on_split(entry, above)
        if is_use:
            self._use(upper)

    def answered(self, key: Key, now: float, stop: str) -> None:
        """The request whose input ends with `key` was answered; `stop` is why the answer ended,
        such as `tool_use`, or "". An optional event: a policy may ignore it, and must work well
        without it."""

    def ended(self, key: Key, now: float) -> None:
        """The last user of `key` will not continue from it. If `key` is a leaf, its conversation
        is over, with everything that no other conversation shares. If it is an inner key, it and
        its descendants are over, but its ancestors are not. An optional event."""

    def stepped(
        self, key: Key, now: float, workflow: str, agent: str, base: Key | None = None
    ) -> None:
        """The request whose input ends with `key` was a step of `agent` in `workflow`. An
        optional event. Names of one tenant never equal those of another.

        base: `key` or one above it, the last of those that the agent's prompts begin with before their
        first message; None: not known"""

    def workflow_ended(self, workflow: str, now: float) -> None:
        """`workflow` has no further steps. An optional event; others may still use what its
        steps used."""

    def resize(self, key: Key, nbytes: int) -> None:
        """`key` takes `nbytes` now. Does not count as a use. Unknown keys are ignored."""
        entry = self._entries.get(key)
        if entry is not None:
            self._resize(entry, nbytes)

    def standing(self, key: Key) -> float | None:
        """How a key ranks, a leaf or not, apart from when it was used: what stands lower leaves first, and
        below 0 stands what is not expected to be used again. None: it is not in the tier."""
        entry = self._entries.get(key)
        return None if entry is None else self._rank(entry)[0]

    def leaves(self) -> list[Key]:
        """The keys without children in the tier."""
        return [key for key in self._leaves if self._is_leaf(key)]

    def is_leaf(self, key: Key) -> bool:
        """Whether `key` is in the tier, and none of its children is."""
        return key in self._entries and self._is_leaf(key)

    def explain(self, key: Key, now: float) -> dict[str, Any]:
        """Explains the rank of `key` to a person: `score`, `place` (how many keys are evicted
        before it; None if it has children), `used` (time of its last use) and what else the policy
        knows. Empty for unknown keys. Changes nothing. O(number of keys)."""
        entry = self._entries.get(key)
        if entry is None:
            return {}
        self._rank_leaves()
        if not self._is_leaf(key):
            return {"score": self._rank(entry)[0], "place": None, "used": self._last_use(key)}
        leaves = {pair for pair in self._heap if self._is_current(*pair)}
        place = sum(pair < (entry.ranked, key) for pair in leaves)
        return {"score": entry.ranked[0], "place": place, "used": entry.used}

    def _last_use(self, key: Key) -> float:
        """The latest use in the subtree of an inner key."""
        used, stack = _NEVER, [key]
        while stack:
            entry = self._entries.get(stack.pop())
            if entry is not None:
                used = max(used, entry.used)
                stack += self.tree.children(entry.key)
        return used

    def victims(self, bytes_needed: int, is_evictable: Evictable, frees: Frees = None) -> list[Key]:
        """Keys to evict, in order, that free at least `bytes_needed`, or all evictable keys.
        Changes nothing: the caller removes the keys that it actually evicts."""
        return self.lowest(bytes_needed, is_evictable, frees)

    def lowest(self, nbytes: int, is_evictable: Evictable, frees: Frees = None) -> list[Key]:
        """The keys that come first in the order of eviction, `nbytes` of them; none is about to be
        evicted. Changes nothing."""
        return [entry.key for _, entry in self._offers(nbytes, is_evictable, frees)]

    def _offers(
        self, bytes_needed: int, is_evictable: Evictable, frees: Frees
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
            freed += offer[1].nbytes if frees is None else frees(offer[1].key)
        order.close()
        return offers

    def copy_from(self, other: Policy) -> None:
        """Become a copy of `other`, with its times and visits."""
        self._entries = {k: replace(entry, until_s=_NEVER) for k, entry in other._entries.items()}
        self._child = dict(other._child)
        self._leaves = {key: self._entries[key] for key in other._leaves}
        self._nbytes, self._now = other._nbytes, other._now
        self._heap = []
        self._is_unranked = True

    def check_integrity(self, known: Mapping[Key, int] | None = None) -> None:
        """Raises AssertionError if leaves, sums and order disagree with the keys and the tree.
        known: the size that each key must have."""
        entries = self._entries
        assert self._nbytes == sum(e.nbytes for e in entries.values()), "bytes are miscounted"
        leaves = {key for key in entries if self._is_leaf(key)}
        assert leaves <= self._leaves.keys() <= entries.keys(), "leaves are not listed as such"
        ranked = {key for rank, key in self._heap if self._is_current(rank, key)}
        lost = leaves - ranked - self._unranked
        assert self._is_unranked or not lost, f"the leaves {lost} are never ranked"
        if known is not None:
            found = {key: entry.nbytes for key, entry in entries.items()}
            wrong = [k for k in {*found, *known} if found.get(k) != known.get(k)]
            assert not wrong, f"{wrong[0]} has {found.get(wrong[0])}, not {known.get(wrong[0])}"

    # ---- inside -----------------------------------------------------------------------------

    def _in_order(self, is_evictable: Evictable) -> Generator[tuple[Rank, Entry], None, None]:
        """Entries in the order of their eviction, with the ranks at which they are evicted. What
        is popped off the heap is queued for ranking again when the generator is closed."""
        self._rank_leaves()
        heap, taken = self._heap, list[Key]()
        extra: list[tuple[Rank, Key]] = []
        met, gone = set[Key](), set[Key]()
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
                gone.add(key)
                parent = self._above(key)
                if parent is None or parent.key in self._leaves:
                    continue
                self._inherit(parent, entry)
                if parent.key not in met and self._is_leaf(parent.key, gone):
                    heapq.heappush(extra, (self._rank_after(parent, rank), parent.key))
        finally:
            for key in taken:
                self._push(key)

    def _is_current(self, rank: Rank, key: Key) -> bool:
        """Whether this pair of the heap is a leaf with its rank."""
        entry = self._leaves.get(key)
        if entry is None or entry.ranked != rank:
            return False
        if self._is_leaf(key):
            return True
        del self._leaves[key]
        return False

    def _is_leaf(self, key: Key, gone: Collection[Key] = ()) -> bool:
        """Whether no child of `key` is in the tier, apart from those in `gone`."""
        entries, tree = self._entries, self.tree
        last = self._child.get(key)
        if last in entries and last not in gone and tree.parent(last) == key:
            return False
        for child in tree.children(key):
            if child in entries and child not in gone:
                self._child[key] = child
                return False
        return True

    def _above(self, key: Key) -> Entry | None:
        """The nearest key above it that is in the tier."""
        at = self.tree.parent(key)
        while at is not None and at not in self._entries:
            at = self.tree.parent(at)
        return None if at is None else self._entries[at]

    def _tick(self, now: float) -> None:
        if now > self._now:
            self._now = now

    def _add(self, entry: Entry) -> None:
        key = entry.key
        self._entries[key] = entry
        self._nbytes += entry.nbytes
        if self._is_leaf(key):
            self._leaves[key] = entry
        parent = self.tree.parent(key)
        if parent is not None:
            self._child[parent] = key
            self._leaves.pop(parent, None)

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
            at = self.tree.parent(at)
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

    def _resize(self, entry: Entry, nbytes: int) -> None:
        self._nbytes += nbytes - entry.nbytes
        entry.nbytes = nbytes

    def _inherit(self, parent: Entry, child: Entry) -> None:
        """A use of a child counts as a use of its parent."""
        if child.used > parent.used:
            parent.used = child.used
            parent.visit = child.visit


class LRU(Policy):
    """Evicts the leaf that was used longest ago."""

    def _rank(self, entry: Entry) -> Rank:
        return entry.used, 0.0


@runtime_checkable
class ReuseForecaster(Protocol):
    """A Policy that predicts which keys will be used again, whether they are in the tier or
    not."""

    def wanted(self, now: float, most: int) -> list[tuple[Key, float]]:
        """The last keys of the paths that are expected to be used, each with its value per byte
        (above 0, on the policy's own scale), highest first; empty while the forecasts are not
        trusted. most: the most keys to return. Changes nothing."""
        ...


@runtime_checkable
class Learning(Protocol):
    """A Policy, or a part of one, whose learned state is kept across restarts."""

    def learned(self) -> Mapping[str, Any]:
        """The learned state: JSON values of bounded size, without any keys."""
        ...

    def recall(self, learned: Mapping[str, Any]) -> None:
        """Continue from what `learned` returned. Raises ValueError, KeyError or TypeError for
        anything else; valid parts of it may have been applied by then."""
        ...
