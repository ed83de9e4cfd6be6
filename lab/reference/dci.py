"""Multi-level prioritized DCI in numpy: the specification of kernels/cpp/dci.cpp.

An index of attention keys that finds the keys with the largest inner products with a query, accepts
new keys at any time, and groups similar keys into pages ("IceCache", sections 3.3, 4.1, B.1;
P-DCI: Li and Malik, "Fast k-Nearest Neighbour Search via Prioritized DCI", 2017).

- Keys become points such that the nearest one has the largest inner product (`dci_points`).
- Every key draws a level: 1, plus 1 for each random number below `ratio` in a row. Points of the
  highest level are children of the root, others of the nearest point above. Siblings are a node.
- Leaf nodes are pages (`dci_pages`). A key of the second level is the centre of its own leaf and
  lies in it; keys above lie in a leaf with the children of their parent. After one `add`, each of
  its keys at the bottom moves to the page with the nearest mean, if there is room, among those in
  the leaves of the nearest points above: the leaves are centred on keys that were drawn at random.
- A search descends level by level. In each node that it enters it looks at `visits_max` points,
  first those near the query along fixed random directions; it enters the nodes of the `beam`
  nearest points of a level. With both 0 (no limit) the result is that of brute force. If a search
  for a parent finds none within the limits, it is repeated without limits.

Keys of one `add` enter from the highest level down, so parents exist before their children. A later
key may be nearer to a point than the point's parent is, but the point stays where it is: pages are
split but never merged, and keys of an earlier `add` stay together. The order of sums is as in C++.
"""

from __future__ import annotations

import bisect
import copy
import heapq
import math
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lab.reference.dci_pages import DciPages
from lab.reference.dci_points import DciPoints, DciQuery, Scored
from lab.reference.sums import WORD, mixed

F32: TypeAlias = npt.NDArray[np.float32]
I32: TypeAlias = npt.NDArray[np.int32]
I64: TypeAlias = npt.NDArray[np.int64]
U8: TypeAlias = npt.NDArray[np.uint8]

LEVEL_MAX = 32
_NEAR = 4
_PASSES = 2


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Limits of a search: points that it looks at in a node, and nodes that it enters on a level;
    0: all."""

    visits: int
    beam: int


@dataclass(slots=True)
class _Node:
    owner: int = -1
    members: list[int] = field(default_factory=list)
    lines: list[list[tuple[float, int]]] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class ReferenceDciTree:
    """A tree over keys of `n_dims` numbers.

    directions: float32[n, n_dims + 1], each of length 1; ratio: above 0, at most 0.5; visits_max
    and beam: the limits of the search for a parent. The C++ checks them, here nothing does.
    """

    def __init__(
        self,
        n_dims: int,
        directions: F32,
        ratio: float,
        page_rows: int,
        seed: int,
        visits_max: int,
        beam: int,
    ) -> None:
        self._n_dims, self._ratio, self._seed = n_dims, ratio, seed
        self._building = SearchLimits(visits_max, beam)
        self._points = DciPoints(n_dims, directions)
        self._pages = DciPages(page_rows)
        self._level: list[int] = []
        self._parent: list[int] = []
        self._own_node: dict[int, int] = {}
        self._nodes: list[_Node] = []
        self._root = 0
        self.n_levels = 0
        """Levels that have a point."""

    def __len__(self) -> int:
        return len(self._level)

    @property
    def n_pages(self) -> int:
        """Pages that hold at least one key."""
        return len(self._pages)

    def add(self, keys: F32) -> None:
        """Insert keys [n, n_dims], numbered consecutively after the existing ones."""
        if not len(keys):
            return
        if self._points.make_room(keys):
            self._sort_lines()
        before = len(self)
        for i, key in enumerate(keys):
            self._points.add(key)
            self._level.append(self._drawn_level(before + i))
            self._parent.append(-1)
        self._pages.grow(len(self))
        if before == 0:
            taken = sorted(set(self._level))
            self._level = [taken.index(level) + 1 for level in self._level]
            self.n_levels = len(taken)
            self._nodes.append(self._new_node(-1))
        for i in range(before, len(self)):
            self._level[i] = min(self._level[i], self.n_levels + 1)
        near: list[tuple[int, list[int]]] = []
        for i in sorted(range(before, len(self)), key=lambda i: -self._level[i]):
            near.append((i, self._insert(i)))
        choices = [
            (i, [at for leaf in leaves for at in self._pages_of(leaf)]) for i, leaves in near
        ]
        for _ in range(_PASSES):
            self._pages.settle(self._points, [each for each in choices if each[1]])

    def search(self, queries: F32, k: int, visits_max: int, beam: int) -> I64:
        """int64[n queries, min(k, keys)]: the numbers of the keys with the largest inner products,
        largest first; -1 where a limited search found fewer."""
        n_columns = min(k, max(1, len(self)))
        limits = SearchLimits(visits_max, beam)
        ids = np.full((len(queries), n_columns), -1, np.int64)
        for i, query in enumerate(queries if len(self) else ()):
            found = self._nearest(self._points.as_query(query), 1, True, n_columns, limits)
            ids[i, : len(found)] = [point for _, point in found]
        return ids

    def vote(
        self, queries: F32, k: int, visits_max: int, beam: int, others: F32, there: U8
    ) -> tuple[I64, F32]:
        """Numbers [m], ascending, of all keys that are `there` in the pages that the k nearest
        keys of any query lie in (IceCache section 4.2), and float32[m]: the largest share that any
        query gives each of them of its softmax(q . k / sqrt(n_dims)) over these keys and `others`.

        others: float32[any, n_dims]; there: uint8[n], 0 for a key to leave out"""
        found = self.search(queries, k, visits_max, beam)
        pages = self.pages()
        is_hit = np.zeros(self.n_pages, np.bool_)
        is_hit[pages[found[found >= 0]]] = True
        numbers = (
            np.flatnonzero(is_hit[pages] & (there != 0)) if len(self) else np.zeros(0, np.int64)
        )
        if not len(numbers):
            return numbers, np.zeros(0, np.float32)
        rows = np.concatenate([self._points.keys[numbers], others]).astype(np.float64)
        scores = queries.astype(np.float64) @ rows.T / math.sqrt(self._n_dims)
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        return numbers, shares[:, : len(numbers)].max(0).astype(np.float32)

    def keys(self, numbers: I64) -> F32:
        """float32[m, n_dims]: a copy of the keys with these numbers, int64[m]."""
        return np.ascontiguousarray(self._points.keys[numbers])

    def levels(self) -> I32:
        """int32[n]: the level of each key, 1 at the bottom."""
        return np.array(self._level, np.int32)

    def parents(self) -> I64:
        """int64[n]: the parent of each key, or -1."""
        return np.array(self._parent, np.int64)

    def pages(self) -> I64:
        """int64[n]: the page of each key."""
        return np.array(self._pages.of, np.int64)

    def copy(self) -> ReferenceDciTree:
        """An independent copy of the tree."""
        return copy.deepcopy(self)

    def check_integrity(self) -> None:
        """RuntimeError if a point is not in exactly one node below a point of the next level, a
        node is out of order, or a page holds too many rows or none."""
        times = [0] * len(self)
        for at, node in enumerate(self._nodes):
            if (node.owner < 0) != (at == self._root) or self._own_node.get(node.owner, at) != at:
                raise RuntimeError("a node belongs to the wrong point")
            level = self.n_levels + 1 if node.owner < 0 else self._level[node.owner]
            for i in node.members:
                times[i] += 1
                if self._parent[i] != node.owner or self._level[i] + 1 != level:
                    raise RuntimeError(f"point {i} has the wrong parent")
            for line in node.lines:
                if len(line) != len(node.members) or line != sorted(line):
                    raise RuntimeError("a node is out of order")
        if any(n != 1 for n in times):
            raise RuntimeError("a point is not in exactly one node")
        self._pages.check_integrity()

    def _new_node(self, owner: int) -> _Node:
        return _Node(owner, [], [[] for _ in range(self._points.n_directions)])

    def _sort_lines(self) -> None:
        """All points moved: bring the lines of the nodes in order again."""
        for node in self._nodes:
            for j, line in enumerate(node.lines):
                line[:] = sorted((self._points.projection(i, j), i) for _, i in line)

    def _drawn_level(self, number: int) -> int:
        level, x = 1, mixed((self._seed + number * 0xD1342543DE82EF95) & WORD)
        while level < LEVEL_MAX and (x >> 11) * 2.0**-53 < self._ratio:
            level, x = level + 1, mixed(x)
        return level

    def _insert(self, i: int) -> list[int]:
        """Insert key i. For a key at the bottom, returns the nearest points above, whose leaves it
        may move to."""
        level = self._level[i]
        if level > self.n_levels:
            self._raise(i)
            return []
        if level == self.n_levels:
            self._join(self._root, i)
            return []
        k = min(_NEAR, self._building.beam) or _NEAR
        found = self._nearest(self._points.as_point(i), level + 1, False, k, self._building)
        if not found:  # within the limits there were only points without children
            found = self._nearest(self._points.as_point(i), level + 1, False, k, SearchLimits(0, 0))
        self._join(self._node_of(found[0][1]), i)
        return [j for _, j in found] if level == 1 else []

    def _pages_of(self, leaf: int) -> list[int]:
        """The pages of a point of the second level; if it has no children, its own page."""
        own = self._own_node.get(leaf)
        return [self._pages.of[leaf]] if own is None else self._nodes[own].pages

    def _raise(self, i: int) -> None:
        below = self._nodes[self._root]
        below.owner = i
        for member in below.members:
            self._parent[member] = i
        self._own_node[i] = self._root
        self._root = len(self._nodes)
        self._nodes.append(self._new_node(-1))
        self.n_levels += 1
        self._join(self._root, i)

    def _node_of(self, i: int) -> int:
        if i not in self._own_node:
            self._own_node[i] = len(self._nodes)
            self._nodes.append(self._new_node(i))
            if self._level[i] == 2:
                self._nodes[-1].pages.append(self._pages.of[i])
        return self._own_node[i]

    def _join(self, at: int, i: int) -> None:
        node = self._nodes[at]
        node.members.append(i)
        for j, line in enumerate(node.lines):
            bisect.insort(line, (self._points.projection(i, j), i))
        self._parent[i] = node.owner
        if self._level[i] != 2:
            self._pages.lay(self._points, node.pages, i)
        elif i not in self._own_node:
            self._pages.open(i)
        else:
            self._pages.lay(self._points, self._nodes[self._own_node[i]].pages, i)

    def _visit(self, node: _Node, query: DciQuery, wanted: int, visits: int) -> list[Scored]:
        if visits == 0 or visits >= len(node.members):
            return self._points.scores(query, node.members) if node.members else []
        steps: list[tuple[float, int, int]] = []
        above = [
            bisect.bisect_left(line, (float(query.projections[j]), -1))
            for j, line in enumerate(node.lines)
        ]
        below = list(above)

        def push(j: int, side: int) -> None:
            line = node.lines[j]
            if below[j] > 0 if side == 0 else above[j] < len(line):
                at = line[below[j] - 1][0] if side == 0 else line[above[j]][0]
                distance = abs(np.float32(at) - query.projections[j])
                heapq.heappush(steps, (float(distance), j, side))

        for j in range(len(node.lines)):
            push(j, 0)
            push(j, 1)
        met: dict[int, int] = {}
        found: list[Scored] = []
        while steps and len(found) < visits:
            distance, j, side = heapq.heappop(steps)
            if len(found) >= wanted and _is_beyond(distance, sorted(found)[wanted - 1]):
                break
            below[j] -= side == 0
            i = node.lines[j][below[j] if side == 0 else above[j]][1]
            above[j] += side == 1
            push(j, side)
            met[i] = met.get(i, 0) + 1
            if met[i] == len(node.lines):
                found += self._points.scores(query, [i])
        return found

    def _nearest(
        self, query: DciQuery, level: int, all_levels: bool, k: int, limits: SearchLimits
    ) -> list[Scored]:
        wanted = len(self) + 1 if limits.beam == 0 else max(k, limits.beam)
        best: list[Scored] = []
        nodes = [self._root]
        for at in range(self.n_levels, level - 1, -1):
            found = [
                point
                for node in nodes
                for point in self._visit(self._nodes[node], query, wanted, limits.visits)
            ]
            if all_levels or at == level:
                best += found
            inner = sorted(point for point in found if point[1] in self._own_node)
            nodes = [self._own_node[i] for _, i in inner[: limits.beam or None]]
        return sorted(best)[:k]


def _is_beyond(distance: float, worst: Scored) -> bool:
    """Whether nothing at `distance` or further along some direction is nearer than `worst`."""
    length = np.float32(distance)
    return bool(length * length >= np.float32(2) + np.float32(2) * np.float32(worst[0]))
