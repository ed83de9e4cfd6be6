"""Tips: where the longest towers used last end, so that a chat's next turn is found at once.

A chat of ten thousand turns is a path of twenty thousand nodes, and its next prompt begins with all
of it. The whole prefix of a tip is kept beside it: one comparison tells how far a prompt agrees with
it, token by token, and the walk through the trie goes on from there. So does the hash for keys.

    root ... branch | own nodes of a scope ................... tip
    prompt  [ = prefix of the tip                            ) [ walked, or new )
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from towerd.store.node import ID_BYTES, Node
from towerd.store.scope import is_public

TOKENS_MIN = 256
"""Shorter towers are walked as quickly."""
TIPS_MAX = 64
BYTES_MAX = 32 << 20
_PART_BYTES = 256


@dataclass(frozen=True, slots=True, eq=False)
class Tip:
    """`prefix`: the ids [0, node.p1). `branch`: the last node on its path that is not of its scope.
    `hash`: what gives the keys of the nodes below it, once it is fed their ids."""

    node: Node
    prefix: bytes
    branch: Node
    hash: hashlib.blake2b


class Tips:
    """Not thread-safe; the store's lock guards it. Bounded: those used longest ago are forgotten."""

    def __init__(self) -> None:
        self._tips: OrderedDict[int, Tip] = OrderedDict()
        """By node id, the last used last."""
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._tips)

    def problems(self) -> Iterator[str]:
        """What does not agree with the trie."""
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
        """Remember `node`, in place of the tip that it goes on from."""
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
        """The tip that `node` is."""
        tip = self._tips.get(node.id)
        return tip if tip is not None and tip.node is node else None

    def nearest(self, start: Node, ids: bytes, scope: str) -> Node:
        """The deepest node on a tip's path, of `scope` and below `start`, a node of another scope
        whose prefix begins `ids`, of which that is true as well; `start` if there is none."""
        best = start
        for tip in list(self._tips.values()):
            if tip.node.removed:
                self._forget(tip)
                continue
            if tip.branch is not start or tip.node.scope != scope:
                continue
            n = n_common(tip.prefix, ids)
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


def n_common(a: bytes, b: bytes) -> int:
    """How many tokens two prefixes begin with in common; at once if they part early."""
    total = min(len(a), len(b))
    start, size = 0, _PART_BYTES
    while start < total:
        end = min(total, start + size)
        if a[start:end] != b[start:end]:
            n = (end - start) // ID_BYTES
            differs = np.frombuffer(a, np.int32, n, start) != np.frombuffer(b, np.int32, n, start)
            return start // ID_BYTES + int(differs.argmax())
        start, size = end, 2 * size
    return total // ID_BYTES
