"""RunIndex: runs of a prompt's tokens that are stored anywhere in the prefix tree.

A prompt that changed in the middle leaves its known path, but what follows the change is often stored,
behind other tokens or at another position. An index in memory (`lab.reference.token_index`) has one
window of 32 tokens of about 17: any 64 tokens that a prompt and a path share have one of them in
common. What it finds are places to compare at: only compared tokens make a run.

Windows are keyed by the scope whose node they end in, under a secret that each process draws, so a
scope meets neither the entries of another one nor chosen collisions with them.

The index is derived from the tree, in memory only. Nothing is entered before `begin`; from then on
`work` enters in small steps what the tree had, and `find` what it got since.
"""

from __future__ import annotations

import hashlib
import secrets
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.kernels._native import (
    TOKEN_INDEX_CONTEXT,
    TOKEN_INDEX_PLACES,
    TOKEN_INDEX_SHARDS,
    TokenIndex,
    common_after,
    common_before,
)
from towerd.media_ids import is_token
from towerd.store.tree.node import Node
from towerd.store.tree.scope import public_of
from towerd.store.tree.tree import PrefixTree
from towerd.tokens import ID_BYTES, Ids, ids_array, ids_bytes

RUN_TOKENS = TOKEN_INDEX_CONTEXT
"""Runs of at least this many tokens are found."""
VISITS_MAX = 1200
"""A search compares tokens with at most this many nodes, and one more for each VISIT_TOKENS tokens of
the prompt; each place to compare at counts as _PLACE_VISITS more. A visit takes 2 microseconds."""
VISIT_TOKENS = 75
_PLACE_VISITS = 2
_STEP_TOKENS = 60_000
"""Tokens entered at once, a millisecond's work; a node's own cost is that of _NODE_TOKENS."""
_NODE_TOKENS = 250
STALE_MIN = 1000
_SHARDS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Tokens [at, at + n) of a prompt equal tokens [start, start + n) of the path of `node`, which has
    the last of them."""

    at: int
    start: int
    n: int
    node: Node

    @property
    def end(self) -> int:
        """The position after the run in the prompt."""
        return self.at + self.n


class RunIndex:
    """Not thread-safe; the store's lock guards it."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._secret = secrets.token_bytes(16)
        self._windows = TokenIndex(secrets.randbits(64))
        self._keys: dict[str, int] = {}
        self._grown: deque[tuple[Node, int]] | None = None
        self._loaded: deque[int] = deque()
        """Ids of nodes that the tree had at `begin`."""
        self._n_entered = 0
        """Nodes entered, those removed since the last compaction included."""
        self._live: npt.NDArray[np.int64] | None = None
        """While a compaction is under way: the ids of the nodes that the tree had when it began, and of
        those entered since; ascending."""
        self._shard = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the entered windows take."""
        return self._windows.nbytes

    def begin(self) -> None:
        """Have the nodes of the tree entered, those that it has and those that it gets."""
        if self._grown is None:
            self._grown = self._tree.grown = deque()
            self._loaded = deque(self._tree.nodes)

    @property
    def is_behind(self) -> bool:
        """Whether `work` has something to do."""
        return bool(self._grown or self._loaded or self._is_stale or self._live is not None)

    def work(self) -> None:
        """Do one or two milliseconds' share of what there is to do."""
        if self._grown or self._loaded:
            self._enter()
            return
        if self._live is None and self._is_stale:
            self._live = np.sort(np.fromiter(self._tree.nodes, np.int64, len(self._tree)))
            self._n_entered = len(self._tree)
        elif self._live is not None:
            stop = min(self._shard + _SHARDS_AT_ONCE, TOKEN_INDEX_SHARDS)
            self._windows.compact(self._live, self._shard, stop)
            self._shard = stop % TOKEN_INDEX_SHARDS
            if not self._shard:
                self._live = None

    @property
    def _is_stale(self) -> bool:
        """Whether too many entered nodes were removed."""
        n_waiting = len(self._loaded) + len(self._grown or ())
        n_removed = self._n_entered - len(self._tree) + n_waiting
        return n_removed > max(STALE_MIN, len(self._tree) // 2)

    def _enter(self) -> None:
        """Enter nodes that wait, new ones first."""
        nodes, waiting, left = [], self._grown or (), _STEP_TOKENS
        while left > 0 and (waiting or self._loaded):
            node: Node | None
            if waiting:
                node, lower_id = waiting.popleft()
            else:
                node, lower_id = self._tree.nodes.get(self._loaded.popleft()), 0
            if node is not None and not node.removed:
                nodes.append(self._entry(node, lower_id))
                left -= node.n + _NODE_TOKENS
        self._windows.add(nodes)
        self._n_entered += len(nodes)
        if self._live is not None and nodes:  # an id may be that of a node that was removed
            ids = np.sort(np.array([entry[2] for entry in nodes], np.int64))
            self._live = np.insert(self._live, self._live.searchsorted(ids), ids)

    def _entry(self, node: Node, lower_id: int) -> tuple[int, int, int, int, int, bytes, bytes]:
        """What the index takes of a node. lower_id: of the node that it was split from, or 0."""
        above = node.parent
        assert above is not None
        parent_id, before = above.id, above.ids[-TOKEN_INDEX_CONTEXT * ID_BYTES :]
        while len(before) < TOKEN_INDEX_CONTEXT * ID_BYTES and above.parent is not None:
            above = above.parent
            before = above.ids[len(before) - TOKEN_INDEX_CONTEXT * ID_BYTES :] + before
        return self._key(node.scope), parent_id, node.id, lower_id, node.p0, before, node.ids

    def _key(self, scope: str) -> int:
        key = self._keys.get(scope)
        if key is None:
            digest = hashlib.blake2b(scope.encode(), digest_size=8, key=self._secret).digest()
            key = self._keys[scope] = int.from_bytes(digest, "little")
        return key

    def find(
        self,
        ids: Ids,
        start: int,
        stop: int,
        scope: str,
        n_min: int,
        usable: Callable[[Node], bool],
    ) -> list[StoredRun]:
        """Runs of at least `n_min` tokens of ids[start:stop] that are stored in nodes of `scope` or in
        public ones and lie in `usable` nodes alone; ascending and disjoint. From left to right, each is
        as long as tokens agree on both sides; of several the longest is taken, of equal ones the newest.

        The number of nodes that tokens are compared with is limited: what a longer search would find in
        the rest of the prompt is left out. No run has an id of a medium."""
        self.begin()
        self._enter()
        search = _Search(ids_bytes(ids), start, stop, scope, usable)
        keys = [self._key(each) for each in search.scopes]
        hits = self._windows.find(keys, search.data, start, stop)
        found: list[StoredRun] = []
        first, n_most = 0, len(keys) * TOKEN_INDEX_PLACES
        while first < len(hits) and search.visits_left > 0:
            rows = hits[first : first + n_most].tolist()
            at = rows[0][0]
            places = dict.fromkeys(self._resolve(*row) for row in rows if row[0] == at)
            runs = [run for node, end in places if (run := search.run(node, end, at)) is not None]
            best = max(runs, key=lambda run: run.n, default=None)
            if best is not None and best.n >= n_min:
                found.append(best)
                search.start = best.end
                first = int(hits[:, 0].searchsorted(best.end, "right"))
            else:
                first += sum(row[0] == at for row in rows)
        return found

    def _resolve(self, _at: int, owner: int, end: int) -> tuple[Node | None, int]:
        """The node that has the token before position `end` of an owner's path; None if it is gone."""
        node = self._tree.nodes.get(owner)
        while node is not None and node.p0 >= end:
            node = node.parent  # a split moved the owner's beginning there
        return (node if node is not None and end <= node.p1 else None), end


class _Search:
    """One prompt's search: the comparing."""

    def __init__(
        self, data: bytes, start: int, stop: int, scope: str, usable: Callable[[Node], bool]
    ) -> None:
        self.data = data
        self.start = start
        """Where the next run may begin."""
        self.scopes = tuple(dict.fromkeys((scope, public_of(scope))))
        self.visits_left = VISITS_MAX + (stop - start) // VISIT_TOKENS
        self._ids = ids_array(data)
        self._media = (np.flatnonzero(~is_token(self._ids[start:stop])) + start).tolist()
        self._stop = stop
        self._usable = usable

    def run(self, node: Node | None, end: int, at: int) -> StoredRun | None:
        """The run around token `at` of the prompt and position `end` of the path of `node`, where it
        lies; None if the tokens before them differ."""
        self.visits_left -= _PLACE_VISITS
        if node is None or node.scope not in self.scopes:
            return None
        beyond = bisect_left(self._media, at)
        stop = self._media[beyond] if beyond < len(self._media) else self._stop
        low = max(self.start, self._media[beyond - 1] + 1 if beyond else 0)
        n_before = self._before(node, end, at, low)
        if n_before == 0:
            return None
        last, after = self._after(node, end, at, stop)
        return StoredRun(at - n_before, end - n_before, n_before + after - at, last)

    def _before(self, node: Node | None, end: int, at: int, low: int) -> int:
        """The number of tokens before `end` that agree with the prompt's before `at`, back to `low`."""
        first = at
        while node is not None and at > low and self._may_visit(node):
            n = min(end - node.p0, at - low)
            same = common_before(node.ids, end - node.p0, self.data, at, n)
            at, end = at - same, end - same
            node = node.parent if same == n else None
        return first - at

    def _after(self, node: Node, end: int, at: int, stop: int) -> tuple[Node, int]:
        """How far tokens from `end` on agree with the prompt's from `at` on, up to `stop`: the last
        node, and the position in the prompt. Below a public node there may be two ways on."""
        best = node, at
        ways = [(node, end, at)]
        while ways and best[1] < stop:
            node, end, at = ways.pop()
            if not self._may_visit(node):
                continue
            n = min(node.p1 - end, stop - at)
            n = common_after(node.ids, end - node.p0, self.data, at, n)
            if at + n > best[1]:
                best = node, at + n
            if end + n == node.p1 and at + n < stop and node.by_token:
                token = int(self._ids[at + n])
                below = (node.by_token.get((scope, token)) for scope in reversed(self.scopes))
                ways += [(child, child.p0, at + n) for child in below if child is not None]
        return best

    def _may_visit(self, node: Node) -> bool:
        """Whether to compare with a node: the root has no tokens."""
        self.visits_left -= 1
        return self.visits_left >= 0 and node.parent is not None and self._usable(node)
