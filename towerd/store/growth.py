"""Growing the trie by a path: splits and new nodes, in the catalog and in memory together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from towerd.store.catalog import Catalog, Undo
from towerd.store.keys import segment_key
from towerd.store.node import ID_BYTES, Node
from towerd.store.trie import Match, Trie

_INSERT = (
    "INSERT INTO segments(fingerprint, parent, scope, p0, p1, file, file_row0, file_rows,"
    " last_used, hits, created, key, ids) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


@dataclass(slots=True)
class Growth:
    """One path being inserted inside a catalog transaction; `undo` takes it back in memory."""

    catalog: Catalog
    trie: Trie
    fingerprint: int
    digest: bytes
    now: float
    undo: Undo
    splits: list[tuple[Node, Node]] = field(default_factory=list)
    """(lower, upper) of every split made."""

    def grow(self, ids: bytes, scope: str, ends: Sequence[int]) -> list[Node]:
        """Make sure that a path for `ids` exists with node ends at each of `ends` (ascending,
        the last is the length of `ids`); returns it."""
        match = self.trie.match(ids, scope)
        path = self._cut(match, ids, ends)
        for end in ends:
            if end > match.n:
                parent = path[-1] if path else self.trie.root
                path.append(self._add(parent, scope, ids[: end * ID_BYTES]))
        return path

    def grow_turn(self, ids: bytes, scope: str, n_prompt: int, n_cached: int) -> tuple[Node, Node]:
        """Make the path of a turn of which the first `n_cached` tokens have rows; returns its
        prompt end and its reply end, each no further than that (the root for 0)."""
        ends = sorted({min(n_prompt, n_cached), n_cached} - {0})
        path = self.grow(ids[: n_cached * ID_BYTES], scope, ends) if ends else []
        at = {node.p1: node for node in path} | {0: self.trie.root}
        return at[min(n_prompt, n_cached)], at[n_cached]

    def _cut(self, match: Match, ids: bytes, ends: Sequence[int]) -> list[Node]:
        """Split the matched nodes at every end, and the last where the match stops."""
        path: list[Node] = []
        for node in match.nodes:
            at = bisect_right(ends, node.p0)
            if node.p1 <= match.n and (at == len(ends) or ends[at] >= node.p1):
                path.append(node)  # as most of a long path
                continue
            stop = min(node.p1, match.n)
            inside = {end for end in ends if node.p0 < end <= stop} | {stop}
            for at in sorted(inside - {node.p1}):
                path.append(self._split(node, at, ids[: at * ID_BYTES]))
            if node.p1 <= match.n:
                path.append(node)
        return path

    def _split(self, node: Node, at: int, prefix: bytes) -> Node:
        assert node.parent is not None
        n = at - node.p0
        file_id = None if node.file is None else node.file.id
        upper_id = self.catalog.run(_INSERT, (
            self.fingerprint, node.parent.id or None, node.scope, node.p0, at, file_id,
            node.file_row0, n if file_id is not None else 0, node.last_used, node.hits, self.now,
            segment_key(self.digest, node.scope, prefix), node.ids[: n * ID_BYTES],
        ))  # fmt: skip
        self.catalog.run(
            "UPDATE segments SET parent = ?, p0 = ?, ids = ?, file_row0 = ?, file_rows = ?"
            " WHERE id = ?",
            (
                upper_id, at, node.ids[n * ID_BYTES :],
                node.file_row0 + n if file_id is not None else 0,
                node.p1 - at if file_id is not None else 0, node.id,
            ),
        )  # fmt: skip
        hot = node.hot
        upper = self.trie.split(node, at, upper_id)
        self.undo.append(lambda: self.trie.unsplit(node, upper, hot))
        self.splits.append((node, upper))
        return upper

    def _add(self, parent: Node, scope: str, prefix: bytes) -> Node:
        ids = prefix[parent.p1 * ID_BYTES :]
        p1 = len(prefix) // ID_BYTES
        id = self.catalog.run(_INSERT, (
            self.fingerprint, parent.id or None, scope, parent.p1, p1, None, 0, 0, self.now, 0,
            self.now, segment_key(self.digest, scope, prefix), ids,
        ))  # fmt: skip
        node = Node(id, parent, scope, parent.p1, ids)
        node.last_used = self.now
        self.trie.add(node)
        self.undo.append(lambda: self.trie.remove(node))
        return node
