"""LRU over a tree: the least recently used first, children always before their parents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from towerd.policy.base import Key


@dataclass(slots=True)
class _Entry:
    nbytes: int
    parent: Key | None


class LRU:
    """Entries in order of eviction. An access moves the key and then its ancestors to the end,
    so every entry stands before its parent: O(1) per entry touched."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._nbytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys."""
        return self._nbytes

    def insert(self, key: Key, nbytes: int, now: float, parent: Key | None) -> None:
        """See Policy.insert."""
        entry = self._entries.get(key)
        self._nbytes += nbytes - (entry.nbytes if entry is not None else 0)
        self._entries[key] = _Entry(nbytes, parent)
        self.access(key, now)

    def access(self, key: Key, now: float) -> None:
        """See Policy.access."""
        at: Key | None = key
        while at is not None:
            entry = self._entries.get(at)
            if entry is None:
                return
            self._entries.move_to_end(at)
            at = entry.parent

    def remove(self, key: Key) -> None:
        """See Policy.remove."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._nbytes -= entry.nbytes

    def split(self, lower: Key, upper: Key, upper_nbytes: int, now: float) -> None:
        """See Policy.split. A split happens when a new path runs through the upper part, so
        that part counts as used; the lower one keeps its place."""
        entry = self._entries.get(lower)
        if entry is None:
            return
        entry.nbytes -= upper_nbytes
        self._nbytes -= upper_nbytes
        parent, entry.parent = entry.parent, upper
        self.insert(upper, upper_nbytes, now, parent)

    def victims(self, bytes_needed: int, is_evictable: Callable[[Key], bool]) -> list[Key]:
        """See Policy.victims."""
        chosen: list[Key] = []
        stays: set[Key] = set()  # keys with a child that stays
        freed = 0
        for key, entry in self._entries.items():
            if freed >= bytes_needed:
                break
            if key not in stays and is_evictable(key):
                chosen.append(key)
                freed += entry.nbytes
            elif entry.parent is not None:
                stays.add(entry.parent)
        return chosen
