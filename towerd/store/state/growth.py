"""Inserting a path into the prefix tree: splits and new nodes, in the catalog and in memory."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from towerd.store.catalog.catalog import Catalog, Undo
from towerd.store.segments.keys import key_hash, segment_key
from towerd.store.tree.node import Node
from towerd.store.tree.tree import PrefixTree
from towerd.tokens import ID_BYTES

_INSERT = (
    "INSERT INTO segments(tokenizer, parent, scope, p0, p1, last_used, hits, created, key, ids)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


@dataclass(slots=True)
class Growth:
    """One path being inserted inside a catalog transaction; `undo` reverts it in memory."""

    catalog: Catalog
    tree: PrefixTree
    tokenizer: int
    digest: bytes
    """The tokenizer's."""
    now: float
    undo: Undo
    splits: list[tuple[Node, Node]] = field(default_factory=list)
    """(lower, upper) of every split made."""

    def grow(self, ids: bytes, scope: str, ends: Sequence[int]) -> list[Node]:
        """Ensure that a path for `ids` exists with node ends at each of `ends` (ascending,
        the last is the length of `ids`); returns it."""
        return self._grow(ids, scope, ends)[ends[-1]].path()

    def grow_turn(self, ids: bytes, scope: str, n_prompt: int, n_cached: int) -> tuple[Node, Node]:
        """Insert the path of a turn of which the first `n_cached` tokens have rows. Returns
        its prompt end and its reply end, each capped at `n_cached` (the root for 0)."""
        ends = sorted({min(n_prompt, n_cached), n_cached} - {0})
        at = self._grow(ids[: n_cached * ID_BYTES], scope, ends) if ends else {}
        at[0] = self.tree.root
        return at[min(n_prompt, n_cached)], at[n_cached]

    def _grow(self, ids: bytes, scope: str, ends: Sequence[int]) -> dict[int, Node]:
        """By their ends, nodes of the path for `ids`: among them those that end at `ends`."""
        last, n = self.tree.longest(ids, scope)
        at = self._cut(last, n, ids, ends)
        node = at[n]
        tip = self.tree.tips.get(node)
        hash = None if tip is None else tip.hash
        for end in ends:
            if end > n:
                hash = self._hash(hash, node, scope, ids[: end * ID_BYTES])
                node = at[end] = self._add(
                    node, scope, ids[node.p1 * ID_BYTES : end * ID_BYTES], hash
                )
        if hash is not None and node.p1 == ends[-1]:
            self.tree.tips.add(node, ids, hash)
        return at

    def _cut(self, last: Node, n: int, ids: bytes, ends: Sequence[int]) -> dict[int, Node]:
        """Split the nodes above `last`, of which the first `n` tokens match, at every end, and the
        last where the match stops. By their ends, the nodes from the first end or `n` on."""
        crossing: list[Node] = []
        node = last
        while node.p1 > min(ends[0], n):
            assert node.parent is not None
            crossing.append(node)
            node = node.parent
        at = {node.p1: node}
        for node in reversed(crossing):
            stop = min(node.p1, n)
            inside = ends[bisect_right(ends, node.p0) : bisect_right(ends, stop)]
            for end in sorted({*inside, stop} - {node.p1}):
                at[end] = self._split(node, end, ids[: end * ID_BYTES])
            if node.p1 <= n:
                at[node.p1] = node
        return at

    def _hash(
        self, before: hashlib.blake2b | None, parent: Node, scope: str, prefix: bytes
    ) -> hashlib.blake2b:
        """The hash that gives the key of `prefix`. `before` is the hash of the part up to the
        end of `parent`."""
        if before is None:
            hash = key_hash(self.digest, scope)
            hash.update(prefix)
            return hash
        hash = before.copy()
        hash.update(prefix[parent.p1 * ID_BYTES :])
        return hash

    def _split(self, node: Node, at: int, prefix: bytes) -> Node:
        assert node.parent is not None
        n = at - node.p0
        upper_id = self.catalog.run(
            _INSERT,
            (
                self.tokenizer,
                node.parent.id or None,
                node.scope,
                node.p0,
                at,
                node.last_used,
                node.hits,
                self.now,
                segment_key(self.digest, node.scope, prefix),
                node.ids[: n * ID_BYTES],
            ),
        )
        self.catalog.run(
            "UPDATE segments SET parent = ?, p0 = ?, ids = ? WHERE id = ?",
            (upper_id, at, node.ids[n * ID_BYTES :], node.id),
        )
        # of every fingerprint, not just the one that is open
        self.catalog.run(
            "INSERT INTO views(node, file, row0) SELECT ?, file, row0 FROM views WHERE node = ?",
            (upper_id, node.id),
        )
        self.catalog.run("UPDATE views SET row0 = row0 + ? WHERE node = ?", (n, node.id))
        hot = node.hot
        upper = self.tree.split(node, at, upper_id)
        self.undo.append(lambda: self.tree.unsplit(node, upper, hot))
        self.splits.append((node, upper))
        return upper

    def _add(self, parent: Node, scope: str, ids: bytes, hash: hashlib.blake2b) -> Node:
        p1 = parent.p1 + len(ids) // ID_BYTES
        id = self.catalog.run(
            _INSERT,
            (
                self.tokenizer,
                parent.id or None,
                scope,
                parent.p1,
                p1,
                self.now,
                0,
                self.now,
                hash.digest(),
                ids,
            ),
        )
        node = Node(id, parent, scope, parent.p1, ids)
        node.last_used = self.now
        self.tree.add(node)
        self.undo.append(lambda: self.tree.remove(node))
        return node
