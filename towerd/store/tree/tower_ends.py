"""TowerEnds: the ends of the longest recently used towers, so that a chat's next turn is found at once.

A chat of ten thousand turns is a path of twenty thousand nodes, and its next prompt begins with all
of it. The whole prefix of an end is kept beside it: one comparison tells how many tokens of a prompt
agree with it, and the walk through the tree continues from there. So does the hash for keys.

    root ... branch | own nodes of a scope ................... end
    prompt  [ = prefix of the end                            ) [ walked, or new )
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from towerd.store.tree.node import Node
from towerd.store.tree.scope import is_public
from towerd.tokens import common_prefix, ids_array

TOKENS_MIN = 256
"""Minimum length; shorter towers are walked just as quickly."""
ENDS_MAX = 64
BYTES_MAX = 32 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TowerEnd:
    """`prefix`: the ids [0, node.p1). `branch`: the last node on its path that is not of its
    scope. `hash`: gives the keys of nodes below it when updated with their ids."""

    node: Node
    prefix: bytes
    branch: Node
    hash: hashlib.blake2b


class TowerEnds:
    """Not thread-safe; the store's lock guards it. Bounded: the least recently used are evicted."""

    def __init__(self) -> None:
        self._ends: OrderedDict[int, TowerEnd] = OrderedDict()
        """By node id, most recently used last."""
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._ends)

    def problems(self) -> Iterator[str]:
        """Inconsistencies with the prefix tree."""
        if self._nbytes != sum(len(end.prefix) for end in self._ends.values()):
            yield "the tower ends' bytes are miscounted"
        for end in self._ends.values():
            if end.node.removed:
                continue
            path = end.node.path()
            own = next(i for i, node in enumerate(path) if node.scope == end.node.scope)
            if end.prefix != end.node.prefix_bytes() or end.branch is not path[own].parent:
                yield f"the tower end {end.node} is remembered with another prefix"

    def add(self, node: Node, prefix: bytes, hash: hashlib.blake2b) -> None:
        """Remember `node`; it replaces the end that it extends."""
        if is_public(node.scope) or node.p1 < TOKENS_MIN:
            return
        above, before = node, self.get(node)
        while before is None and above.parent is not None and above.parent.scope == node.scope:
            above = above.parent
            before = self.get(above)
        branch = above.parent if before is None else before.branch
        assert branch is not None
        if before is not None:
            self._forget(before)
        self._ends[node.id] = TowerEnd(node, prefix, branch, hash)
        self._nbytes += len(prefix)
        while len(self._ends) > ENDS_MAX or self._nbytes > BYTES_MAX:
            self._forget(next(iter(self._ends.values())))

    def get(self, node: Node) -> TowerEnd | None:
        """The end at `node`, if there is one."""
        end = self._ends.get(node.id)
        return end if end is not None and end.node is node else None

    def nearest(self, start: Node, ids: bytes, scope: str) -> Node:
        """The deepest node on an end's path that is of `scope`, lies below `start` and whose
        prefix begins `ids`; `start` if there is none. `start` is a node of another scope
        whose prefix also begins `ids`."""
        best, wanted = start, ids_array(ids)
        for end in list(self._ends.values()):
            if end.node.removed:
                self._forget(end)
                continue
            if end.branch is not start or end.node.scope != scope:
                continue
            n = common_prefix(ids_array(end.prefix), wanted)
            node = end.node if n > best.p1 else best
            while node.p1 > n:
                assert node.parent is not None
                node = node.parent
            if node.p1 > best.p1:
                best = node
        return best

    def _forget(self, end: TowerEnd) -> None:
        if self._ends.pop(end.node.id, None) is not None:
            self._nbytes -= len(end.prefix)
