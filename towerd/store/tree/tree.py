"""The prefix tree in memory: longest-prefix match over token ids, path-compressed.

Nodes, the tree and its tower ends belong to the lock of their store. Whoever reads or changes them holds
that lock: the threads of requests, of the tiers, of freezing and thawing, the event loop. Only
these may be used without it: the tokens and the id of a Node, `PrefixTree.held`, and a Handle, which
takes the lock itself. The inference thread never keeps a Node; it keeps a Handle for each job.
A Listener is called under the lock, and must not wait for anything that needs it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from towerd.store.segments.segment_file import SegmentFile
from towerd.store.segments.segment_header import key_hash
from towerd.store.tree.node import PUBLIC, Node
from towerd.store.tree.scope import is_public, public_of
from towerd.store.tree.tower_ends import TowerEnds
from towerd.tokens import ID_BYTES, common_prefix, ids_array


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix: `nodes` from the root's child down, `n` tokens matched.

    Every node but the last is matched in full; the last may be matched in part."""

    nodes: tuple[Node, ...]
    n: int

    def first(self, n: int) -> Match:
        """The match of the first `n` tokens alone."""
        if n >= self.n:
            return self
        return Match(self.nodes[: bisect_left(self.nodes, n, key=lambda node: node.p0)], n)


@dataclass(frozen=True, slots=True)
class Matched:
    """Nodes whose whole prefix begins some ids: `ends` and all their ancestors. Each
    iteration yields every node once, longest prefix first, from the current state of the
    tree."""

    ends: tuple[Node, ...]

    def __iter__(self) -> Iterator[Node]:
        waiting = [(-end.p1, -i, end) for i, end in enumerate(self.ends) if end.parent is not None]
        heapq.heapify(waiting)
        seen: set[int] = set()
        while waiting:
            _, i, node = heapq.heappop(waiting)
            if node.id not in seen:
                yield node
                seen.add(node.id)
                if node.parent is not None and node.parent.parent is not None:
                    heapq.heappush(waiting, (-node.parent.p1, i, node.parent))


class PrefixTree:
    """Nodes by id and by prefix. Not thread-safe; the store's lock guards it.

    Children are keyed by (scope, first token). A public node may have children of any scope whose
    rows are made under the same adapters, the root of any scope, any other node of its own."""

    def __init__(self) -> None:
        self.root = Node(0, None, PUBLIC, 0, b"")
        self.nodes: dict[int, Node] = {}
        self.tower_ends = TowerEnds()
        self.version = 0
        """Changes with every change of a path."""
        self.held: dict[object, Node] = {}
        """The last node of each path that a running request needs, by its Handle."""
        self.grown: deque[tuple[Node, int]] | None = None
        """For the index of runs, once there is one: each new node, and the id of the node that it was
        split from, or 0."""
        self._viewers: dict[SegmentFile, list[Node]] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    def match(self, ids: bytes, scope: str) -> Match:
        """The longest prefix of `ids` (int32 LE) among the nodes of `scope` and public nodes.
        Ties prefer the scope's own nodes, then those that share most with public ones."""
        last, n = self.longest(ids, scope)
        return Match(tuple(last.path()), n)

    def longest(self, ids: bytes, scope: str) -> tuple[Node, int]:
        """The last node that `match` finds, or the root, and the number of matched tokens."""
        return max(self._chains(ids, scope), key=lambda chain: chain[1])

    def held_ids(self) -> frozenset[int]:
        """The ids of the last nodes of the paths that running requests need."""
        return frozenset([node.id for node in list(self.held.values())])

    def holds_any(self, nodes: Iterable[Node], others: Iterable[int] = ()) -> bool:
        """Whether a running request needs one of these nodes. others: ids of the last nodes of
        paths that requests of other processes need."""
        ids = {node.id for node in nodes}
        held = list(self.held.values()) + [self.nodes[id] for id in others if id in self.nodes]
        return any(not ids.isdisjoint(each.id for each in node.path()) for node in held)

    def matched(self, ids: bytes, scope: str, others: Sequence[str] = ()) -> Matched:
        """Every node of `scope`, of `others` or public whose whole prefix begins `ids`. They lie on
        more than one path if tokens were stored under several scopes."""
        chains = [chain for each in (scope, *others) for chain in self._chains(ids, each)]
        return Matched(tuple(_full(last, n) for last, n in chains))

    def _chains(self, ids: bytes, scope: str) -> list[tuple[Node, int]]:
        """(last node met, tokens matched) of every matching path: the scope's own branches,
        deepest first, then the public path."""
        tokens = memoryview(ids).cast("i")
        public, n = walk(self.root, ids, tokens, public_of(scope))
        chains = []
        start = None if is_public(scope) else _full(public, n)
        while start is not None:
            near = self.tower_ends.nearest(start, ids, scope)
            own, own_n = walk(near, ids, tokens, scope)
            if own is not start:
                chains.append((own, own_n))
            start = start.parent
        return [*chains, (public, n)]

    def keys(self, identity: bytes) -> Iterator[tuple[Node, bytes]]:
        """Every node with its key under a tokenizer's or a row identity's digest. O(all tokens)."""
        scopes = {node.scope for node in self.nodes.values()} | {PUBLIC}
        roots = {scope: key_hash(identity, scope) for scope in scopes}
        stack = [(child, roots) for child in self.root.children]
        while stack:
            node, above = stack.pop()
            # a public node may have children of any scope, any other node only of its own
            wanted = scopes if is_public(node.scope) and node.children else {node.scope}
            hashes = {scope: above[scope].copy() for scope in wanted}
            for h in hashes.values():
                h.update(node.ids)
            yield node, hashes[node.scope].digest()
            stack += [(child, hashes) for child in node.children]

    def count_above(self, ends: Mapping[int, int]) -> Counter[int]:
        """Node id -> how many of `ends`, which are node ids with their numbers, lie at or below it.
        Takes no lock: a node that a split adds meanwhile may be missing, no count is wrong.
        O(nodes), not O(nodes on all paths)."""
        counts: Counter[int] = Counter()
        nodes = list(self.nodes.values())
        counts.update({node.id: n for node in nodes if (n := ends.get(node.id))})
        known = {node.id for node in nodes}
        between: list[tuple[Node, int]] = []
        for node in sorted(nodes, key=attrgetter("p0"), reverse=True):
            n, above = counts.get(node.id), node.parent
            if n is None or above is None or above.parent is None:
                continue
            counts[above.id] += n
            if above.id not in known:
                between.append((above, n))
        for node, n in between:
            for above in node.path()[:-1]:
                counts[above.id] += n
        return counts

    def viewers(self, file: SegmentFile) -> Sequence[Node]:
        """The nodes whose rows are in `file`."""
        return self._viewers.get(file, ())

    def view(self, node: Node, file: SegmentFile, row0: int) -> None:
        """Record that the rows of `node` are those of `file` from `row0` on."""
        self.unview(node)
        node.file, node.file_row0 = file, row0
        self._viewers.setdefault(file, []).append(node)

    def unview(self, node: Node) -> None:
        """Record that `node` has no rows on disk."""
        if node.file is None:
            return
        viewers = self._viewers[node.file]
        viewers.remove(node)
        if not viewers:
            del self._viewers[node.file]
        node.file, node.file_row0 = None, 0

    def add(self, node: Node) -> None:
        """Insert a new node below `node.parent`. The place must be free."""
        assert node.parent is not None
        parent, place = node.parent, (node.scope, node.first)
        if parent.by_token is None:
            parent.by_token = {}
        assert place not in parent.by_token
        parent.by_token[place] = node
        self.nodes[node.id] = node
        self.version += 1
        if self.grown is not None:
            self.grown.append((node, 0))

    def remove(self, node: Node) -> None:
        """Remove a leaf."""
        assert node.parent is not None
        assert node.parent.by_token is not None
        assert not node.by_token
        del node.parent.by_token[node.scope, node.first]
        del self.nodes[node.id]
        node.removed = True
        self.version += 1

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
            self.view(upper, node.file, node.file_row0)
            node.file_row0 += n
        if node.hot is not None:
            upper.hot, node.hot = node.hot.split(at)
            upper.origin = node.origin
        node.parent, node.p0, node.ids = upper, at, node.ids[n * ID_BYTES :]
        upper.by_token = {(node.scope, node.first): node}
        self.nodes[upper_id] = upper
        self.version += 1
        if self.grown is not None:
            self.grown.append((upper, node.id))
        return upper

    def unsplit(self, node: Node, upper: Node, hot: object) -> None:
        """Undo `split(node, ...)`, which returned `upper`; `hot` is the node's rows before
        the split."""
        parent = upper.parent
        assert parent is not None
        assert parent.by_token is not None
        parent.by_token[upper.scope, upper.first] = node
        if node.file is not None:
            self.unview(upper)
            node.file_row0 -= upper.n
        node.hot = hot  # type: ignore[assignment]  # what split() replaced
        node.parent, node.p0, node.ids = parent, upper.p0, upper.ids + node.ids
        del self.nodes[upper.id]
        upper.removed = True
        self.version += 1


def walk(node: Node, ids: bytes, tokens: memoryview[int], scope: str) -> tuple[Node, int]:
    """Follow `scope`'s children from below `node`; the last node met and the position reached."""
    at, total = node.p1, len(tokens)
    while node.by_token and at < total:
        child = node.by_token.get((scope, tokens[at]))
        if child is None:
            break
        node = child
        if not ids.startswith(child.ids, at * ID_BYTES):  # memcmp; no copy
            ends = ids_array(ids[at * ID_BYTES : child.p1 * ID_BYTES])
            return node, at + common_prefix(ids_array(child.ids), ends)
        at = child.p1
    return node, at


def _full(last: Node, n: int) -> Node:
    """The last node that is matched in full, given `last`, the last node met."""
    if last.p1 > n:
        assert last.parent is not None
        return last.parent
    return last


class Listener:
    """Each method is called under the store's lock, in the same critical section as the
    change, once the change is durable. Changes that are rolled back are not reported. A
    method must be quick, must not change the store, and must not wait for a thread that may
    wait for the store. This implementation does nothing."""

    def split(self, lower: Node, upper: Node) -> None:
        """`lower` was split; `upper` holds its beginning and is its new parent."""

    def removed(self, node: Node) -> None:
        """A segment was removed from the prefix tree, together with its rows in memory."""

    def became_hot(self, nodes: Sequence[Node]) -> None:
        """Segments have new rows in memory."""

    def left_hot(self, node: Node) -> None:
        """A segment's rows in memory were released."""

    def became_warm(self, file: SegmentFile, nodes: Sequence[Node]) -> None:
        """A file was written with the rows of `nodes`."""

    def left_warm(self, file: SegmentFile, nodes: Sequence[Node]) -> None:
        """A file was removed, and with it the rows of `nodes` on disk. If another file replaced
        it, that is its `successor`, which the next `became_warm` reports."""
