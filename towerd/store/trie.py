"""The cache trie in memory: longest-prefix match over token ids, path-compressed."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from towerd.store.node import ID_BYTES, PUBLIC, Node
from towerd.store.scope import is_public, public_of
from towerd.store.tips import Tips


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix: `nodes` from the root's child down, `n` tokens matched.

    Every node but the last is matched in full; the last perhaps only in part."""

    nodes: tuple[Node, ...]
    n: int

    @property
    def full(self) -> tuple[Node, ...]:
        """The nodes that are matched in full."""
        is_partial = bool(self.nodes) and self.nodes[-1].p1 > self.n
        return self.nodes[:-1] if is_partial else self.nodes


@dataclass(frozen=True, slots=True)
class Matched:
    """Nodes whose whole prefix begins some ids: `tips`, and all above them. Each iteration gives
    every one once, the longest prefix first, as the trie is then."""

    tips: tuple[Node, ...]

    def __iter__(self) -> Iterator[Node]:
        waiting = [(-tip.p1, -i, tip) for i, tip in enumerate(self.tips) if tip.parent is not None]
        heapq.heapify(waiting)
        seen: set[int] = set()
        while waiting:
            _, i, node = heapq.heappop(waiting)
            if node.id not in seen:
                yield node
                seen.add(node.id)
                if node.parent is not None and node.parent.parent is not None:
                    heapq.heappush(waiting, (-node.parent.p1, i, node.parent))


class Trie:
    """Nodes by id and by prefix. Not thread-safe; the store's lock guards it.

    Children are keyed by (scope, first token). A public node may have children of any scope whose
    rows are made under the same adapters, the root of any scope, any other node of its own."""

    def __init__(self) -> None:
        self.root = Node(0, None, PUBLIC, 0, b"")
        self.nodes: dict[int, Node] = {}
        self.tips = Tips()

    def __len__(self) -> int:
        return len(self.nodes)

    def match(self, ids: bytes, scope: str) -> Match:
        """The longest prefix of `ids` (int32 LE) among `scope`'s own and public nodes; of
        equally long ones the scope's own, of those the one that shares most with public ones."""
        last, n = self.longest(ids, scope)
        return Match(tuple(last.path()), n)

    def longest(self, ids: bytes, scope: str) -> tuple[Node, int]:
        """The last node of what `match` finds, the root if there is none, and the tokens matched."""
        return max(self._chains(ids, scope), key=lambda chain: chain[1])

    def matched(self, ids: bytes, scope: str) -> Matched:
        """Every visible node whose whole prefix begins `ids`. These are the nodes of more than one
        path where a scope stored tokens before they became public."""
        return Matched(tuple(_full(last, n) for last, n in self._chains(ids, scope)))

    def _chains(self, ids: bytes, scope: str) -> list[tuple[Node, int]]:
        """(last node met, tokens matched) of every way down: the scope's own branches, the deepest
        first, then the public path."""
        tokens = memoryview(ids).cast("i")
        public, n = _walk(self.root, ids, tokens, public_of(scope))
        chains = []
        start = None if is_public(scope) else _full(public, n)
        while start is not None:
            near = self.tips.nearest(start, ids, scope)
            own, own_n = _walk(near, ids, tokens, scope)
            if own is not start:
                chains.append((own, own_n))
            start = start.parent
        return [*chains, (public, n)]

    def add(self, node: Node) -> None:
        """Put a new node below `node.parent`. The place must be free."""
        assert node.parent is not None
        parent, place = node.parent, (node.scope, node.first)
        if parent.by_token is None:
            parent.by_token = {}
        assert place not in parent.by_token
        parent.by_token[place] = node
        self.nodes[node.id] = node

    def remove(self, node: Node) -> None:
        """Take a leaf out."""
        assert node.parent is not None
        assert node.parent.by_token is not None
        assert not node.by_token
        del node.parent.by_token[node.scope, node.first]
        del self.nodes[node.id]
        node.removed = True

    def split(self, node: Node, at: int, upper_id: int) -> Node:
        """Cut `node` at position p0 < at < p1: a new upper node takes [p0, at), `node` keeps
        [at, p1), its id and its children; both keep viewing the same rows. Returns the upper."""
        assert node.p0 < at < node.p1
        assert node.parent is not None
        assert node.parent.by_token is not None
        n = at - node.p0
        upper = Node(upper_id, node.parent, node.scope, node.p0, node.ids[: n * ID_BYTES])
        upper.pins, upper.hits, upper.last_used = node.pins, node.hits, node.last_used
        node.parent.by_token[node.scope, node.first] = upper
        if node.file is not None:
            upper.file, upper.file_row0 = node.file, node.file_row0
            node.file.nodes.append(upper)
            node.file_row0 += n
        if node.hot is not None:
            upper.hot, node.hot = node.hot.split(at)
            upper.derived = node.derived
        node.parent, node.p0, node.ids = upper, at, node.ids[n * ID_BYTES :]
        upper.by_token = {(node.scope, node.first): node}
        self.nodes[upper_id] = upper
        return upper

    def unsplit(self, node: Node, upper: Node, hot: object) -> None:
        """Undo `split(node, ...)`, whose result was `upper`; `hot` is node's rows before it."""
        parent = upper.parent
        assert parent is not None
        assert parent.by_token is not None
        parent.by_token[upper.scope, upper.first] = node
        if node.file is not None:
            node.file.nodes.remove(upper)
            node.file_row0 -= upper.n
        node.hot = hot  # type: ignore[assignment]  # what split() replaced
        node.parent, node.p0, node.ids = parent, upper.p0, upper.ids + node.ids
        del self.nodes[upper.id]
        upper.removed = True


def _walk(node: Node, ids: bytes, tokens: memoryview[int], scope: str) -> tuple[Node, int]:
    """Follow `scope`'s children from below `node`; the last node met and the position reached."""
    at, total = node.p1, len(tokens)
    while node.by_token and at < total:
        child = node.by_token.get((scope, tokens[at]))
        if child is None:
            break
        node = child
        if not ids.startswith(child.ids, at * ID_BYTES):  # memcmp; no copy
            return node, at + _common(child.ids, ids, at)
        at = child.p1
    return node, at


def _full(last: Node, n: int) -> Node:
    """The last node that is matched in full, where `last` is the last that was met."""
    if last.p1 > n:
        assert last.parent is not None
        return last.parent
    return last


def _common(run: bytes, ids: bytes, at: int) -> int:
    """How many tokens of `run` equal those of `ids` from position `at` on."""
    n = min(len(run), len(ids) - at * ID_BYTES) // ID_BYTES
    differs = np.frombuffer(run, np.int32, n) != np.frombuffer(ids, np.int32, n, at * ID_BYTES)
    return int(differs.argmax()) if differs.any() else n
