"""Tips: the ends of the longest recently used towers, so that a chat's next turn is found at once.

A chat of ten thousand turns is a path of twenty thousand nodes, and its next prompt begins with all
of it. The whole prefix of a tip is kept beside it: one comparison tells how many tokens of a prompt
agree with it, and the walk through the tree continues from there. So does the hash for keys.

    root ... branch | own nodes of a scope ................... tip
    prompt  [ = prefix of the tip                            ) [ walked, or new )
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
TIPS_MAX = 64
BYTES_MAX = 32 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Tip:
    """`prefix`: the ids [0, node.p1). `branch`: the last node on its path that is not of its
    scope. `hash`: gives the keys of nodes below it when updated with their ids."""

    node: Node
    prefix: bytes
    branch: Node
    hash: hashlib.blake2b


class Tips:
    """Not thread-safe; the store's lock guards it. Bounded: the least recently used are evicted."""

    def __init__(self) -> None:
        self._tips: OrderedDict[int, Tip] = OrderedDict()
        """By node id, most recently used last."""
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._tips)

    def problems(self) -> Iterator[str]:
        """Inconsistencies with the prefix tree."""
        if self._nbytes != sum(len(tip.prefix) for tip in self._tips.values()):
            yield "the tips' bytes are miscounted"
        for tip in self._tips.values():
            if tip.node.removed:
                continue
            path = tip.node.path()
            own = next(i for i, node in enumerate(path) if node.scope == tip.node.scope)
            if tip.prefix != tip.node.prefix_bytes() or tip.branch is not path[own].parent:
                yield f"the tip {tip.node} is remembered with another prefix"

    def add(self, node: Node, prefix: bytes, hash: hashlib.blake2b) -> None:
        """Remember `node`; it replaces the tip that it extends."""
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
        self._tips[node.id] = Tip(node, prefix, branch, hash)
        self._nbytes += len(prefix)
        while len(self._tips) > TIPS_MAX or self._nbytes > BYTES_MAX:
            self._forget(next(iter(self._tips.values())))

    def get(self, node: Node) -> Tip | None:
        """The tip at `node`, if there is one."""
        tip = self._tips.get(node.id)
        return tip if tip is not None and tip.node is node else None

    def nearest(self, start: Node, ids: bytes, scope: str) -> Node:
        """The deepest node on a tip's path that is of `scope`, lies below `start` and whose
        prefix begins `ids`; `start` if there is none. `start` is a node of another scope
        whose prefix also begins `ids`."""
        best, wanted = start, ids_array(ids)
        for tip in list(self._tips.values()):
            if tip.node.removed:
                self._forget(tip)
                continue
            if tip.branch is not start or tip.node.scope != scope:
                continue
            n = common_prefix(ids_array(tip.prefix), wanted)
            node = tip.node if n > best.p1 else best
            while node.p1 > n:
                assert node.parent is not None
                node = node.parent
            if node.p1 > best.p1:
                best = node
        return best

    def _forget(self, tip: Tip) -> None:
        if self._tips.pop(tip.node.id, None) is not None:
            self._nbytes -= len(tip.prefix)
