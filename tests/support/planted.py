"""Policies over a tree that grows with what a test inserts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from towerd.policy import Key, Tree


class Planted:
    """A Tree of keys that were put below others."""

    def __init__(self) -> None:
        self.above: dict[Key, Key | None] = {}

    def parent(self, key: Key) -> Key | None:
        return self.above.get(key)

    def children(self, key: Key) -> Iterable[Key]:
        return [child for child in reversed(self.above) if self.above[child] == key]

    def cut(self, lower: Key, upper: Key) -> None:
        """Put `upper` between a key and its parent."""
        self.above[upper], self.above[lower] = self.above.get(lower), upper


def planted(make: Callable[[Tree], Any]) -> Any:
    """A policy whose `insert` takes the parent, too, and whose `split` cuts the tree."""
    tree = Planted()
    policy = make(tree)
    insert, split = policy.insert, policy.split

    def insert_below(key: Key, nbytes: int, now: float, parent: Key | None) -> None:
        tree.above[key] = parent
        insert(key, nbytes, now)

    def cut(lower: Key, upper: Key, upper_nbytes: int, now: float) -> None:
        if lower in policy:
            tree.cut(lower, upper)
        split(lower, upper, upper_nbytes, now)

    policy.insert, policy.split = insert_below, cut
    return policy
