"""Multi-level prioritized DCI in numpy: the specification of kernels/cpp/dci.cpp.

An index of attention keys that finds the keys with the largest inner products with a query, accepts
new keys at any time, and groups similar keys into pages ("IceCache", sections 3.3, 4.1, B.1;
P-DCI: Li and Malik, "Fast k-Nearest Neighbour Search via Prioritized DCI", 2017).

- Keys become points of length 1 by one more coordinate, [k / c, sqrt(1 - |k|^2 / c^2)] with
  c >= |k| for all keys, and queries become [q / |q|, 0], so the nearest point is the key with the
  largest inner product. When a key longer than c is added, c grows and all points move.
- Every key draws a level: 1, plus 1 for each random number below `ratio` in a row. Points of the
  highest level are children of the root, others of the nearest point above. Siblings are a node.
- Leaf nodes are pages (figure 2). A key of the second level is the centre of its own leaf and lies
  in it; keys above lie in a leaf with the children of their parent. A key joins the page of its
  leaf whose pivot is nearest. A page with more than `page_rows` keys is split: two keys far apart
  become pivots, and each takes the keys nearer to it. After one `add`, each of its keys at the
  bottom moves to the page with the nearest mean, if there is room, among those in the leaves of
  the nearest points above: the leaves are centred on keys that were drawn at random.
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
import heapq
import math
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.kernels.reference.checks import (
    SearchLimits,
    array_of,
    check_index,
    check_int,
    check_limits,
    check_ratio,
    check_rows,
)
from towerd.kernels.reference.sums import WORD, dots, mixed, padded, square_of

F32: TypeAlias = npt.NDArray[np.float32]
I32: TypeAlias = npt.NDArray[np.int32]
I64: TypeAlias = npt.NDArray[np.int64]
U8: TypeAlias = npt.NDArray[np.uint8]
Scored: TypeAlias = tuple[float, int]
"""(minus the score, number of the point): the better one sorts first."""

LEVEL_MAX = 32
DIMS_MAX, DIRECTIONS_MAX, PAGE_MAX = 4096, 64, 1 << 20
_SCALE_MIN = 1e-15
_HEADROOM = 1.25
_NEAR = 4
_PASSES = 2


_NOTHING: F32 = np.zeros(0, np.float32)


@dataclass(slots=True)
class _Node:
    owner: int = -1
    members: list[int] = field(default_factory=list)
    lines: list[list[tuple[float, int]]] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Page:
    pivot: int
    members: list[int]


@dataclass(frozen=True, slots=True)
class _Query:
    vector: F32
    last: np.float32
    projections: F32


@dataclass(frozen=True, slots=True)
class _Mean:
    """The mean of a page's points, and half the square of its length."""

    point: _Query
    half: np.float32


class ReferenceDciTree:
    """A tree over keys of `n_dims` numbers.

    directions: float32[n, n_dims + 1], each of length 1; ratio: above 0, at most 0.5; visits_max
    and beam: the limits of the search for a parent. Raises ValueError with the argument's name.
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
        self._n_dims = check_int(n_dims, "n_dims", 1, DIMS_MAX)
        self._ratio = check_ratio(ratio)
        self._page_rows = check_int(page_rows, "page_rows", 1, PAGE_MAX)
        self._seed = check_int(seed, "seed", 0, (1 << 63) - 1)
        check_rows(directions, n_dims + 1, "directions")
        if not 1 <= len(directions) <= DIRECTIONS_MAX:
            raise ValueError("directions: expected 1 to 64 rows")
        self._building = check_limits(visits_max, beam)
        self._directions = padded(directions[:, :-1])
        self._direction_last = directions[:, -1].astype(np.float64)
        self._scale = 0.0
        self._keys = np.zeros((0, self._directions.shape[1]), np.float32)
        self._square: list[float] = []
        self._last: list[np.float32] = []
        self._raw: list[F32] = []
        self._projection: list[F32] = []
        self._level: list[int] = []
        self._parent: list[int] = []
        self._page: list[int] = []
        self._own_node: dict[int, int] = {}
        self._pages: list[_Page] = []
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
        check_rows(keys, self._n_dims, "keys")
        if not len(keys):
            return
        self._widen(math.sqrt(max(square_of(key) for key in keys)))
        before = len(self)
        for i, key in enumerate(keys):
            self._store(key)
            self._level.append(self._drawn_level(before + i))
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
        for _ in range(_PASSES):
            self._settle([(i, leaves) for i, leaves in near if leaves])

    def search(self, queries: F32, k: int, visits_max: int, beam: int) -> I64:
        """int64[n queries, min(k, keys)]: the numbers of the keys with the largest inner products,
        largest first; -1 where a limited search found fewer."""
        check_rows(queries, self._n_dims, "queries")
        n_columns = min(check_int(k, "k", 1, PAGE_MAX), max(1, len(self)))
        limits = check_limits(visits_max, beam)
        ids = np.full((len(queries), n_columns), -1, np.int64)
        for i, query in enumerate(queries if len(self) else ()):
            found = self._nearest(self._as_query(query), 1, True, n_columns, limits)
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
        check_rows(others, self._n_dims, "others")
        there = array_of(there, "there", np.uint8, 1)
        if len(there) != len(self):
            raise ValueError(f"there: {len(there)} flags for {len(self)} keys")
        pages = self.pages()
        is_hit = np.zeros(self.n_pages, np.bool_)
        is_hit[pages[found[found >= 0]]] = True
        numbers = (
            np.flatnonzero(is_hit[pages] & (there != 0)) if len(self) else np.zeros(0, np.int64)
        )
        if not len(numbers):
            return numbers, np.zeros(0, np.float32)
        rows = np.concatenate([self._keys[numbers, : self._n_dims], others]).astype(np.float64)
        scores = queries.astype(np.float64) @ rows.T / math.sqrt(self._n_dims)
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        return numbers, shares[:, : len(numbers)].max(0).astype(np.float32)

    def keys(self, numbers: I64) -> F32:
        """float32[m, n_dims]: a copy of the keys with these numbers, int64[m]."""
        index = check_index(numbers, len(self), "numbers")
        return np.ascontiguousarray(self._keys[index, : self._n_dims])

    def levels(self) -> I32:
        """int32[n]: the level of each key, 1 at the bottom."""
        return np.array(self._level, np.int32)

    def parents(self) -> I64:
        """int64[n]: the parent of each key, or -1."""
        return np.array(self._parent, np.int64)

    def pages(self) -> I64:
        """int64[n]: the page of each key."""
        return np.array(self._page, np.int64)

    def copy(self) -> ReferenceDciTree:
        """An independent copy of the tree."""
        import copy

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
        if any(not 0 < len(page.members) <= self._page_rows for page in self._pages):
            raise RuntimeError("a page holds too many rows or none")
        for at, page in enumerate(self._pages):
            if any(self._page[i] != at for i in page.members):
                raise RuntimeError("a point is on another page")
        if sum(len(page.members) for page in self._pages) != len(self):
            raise RuntimeError("a point is not on exactly one page")

    def _new_node(self, owner: int) -> _Node:
        return _Node(owner, [], [[] for _ in self._directions])

    def _widen(self, longest: float) -> None:
        if self._scale >= longest and self._scale > 0:
            return
        self._scale = max(_SCALE_MIN, longest * _HEADROOM if len(self) else longest)
        for i in range(len(self)):
            self._last[i] = self._last_of(self._square[i])
            self._projection[i] = self._projected(self._raw[i], self._last[i])
        for node in self._nodes:
            for j, line in enumerate(node.lines):
                line[:] = sorted((float(self._projection[i][j]), i) for _, i in line)

    def _store(self, key: F32) -> None:
        row = padded(key[None])[0]
        self._keys = np.concatenate([self._keys, row[None]])
        self._square.append(square_of(key))
        self._last.append(self._last_of(self._square[-1]))
        self._raw.append(dots(self._directions, row))
        self._projection.append(self._projected(self._raw[-1], self._last[-1]))
        self._parent.append(-1)
        self._page.append(-1)

    def _last_of(self, square: float) -> np.float32:
        return np.float32(math.sqrt(max(0.0, 1.0 - square / (self._scale * self._scale))))

    def _projected(self, raw: F32, last: np.float32) -> F32:
        values = raw.astype(np.float64) / self._scale + self._direction_last * float(last)
        return values.astype(np.float32)

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
        found = self._nearest(self._as_point(i), level + 1, False, k, self._building)
        if not found:  # within the limits there were only points without children
            found = self._nearest(self._as_point(i), level + 1, False, k, SearchLimits(0, 0))
        self._join(self._node_of(found[0][1]), i)
        return [j for _, j in found] if level == 1 else []

    def _settle(self, near: list[tuple[int, list[int]]]) -> None:
        """Move each key to the page with the nearest mean, among the pages of its leaves; the means
        are from before any key moved."""
        pages = {at for _, leaves in near for leaf in leaves for at in self._pages_of(leaf)}
        means = {at: self._mean(self._pages[at]) for at in pages}

        def score(i: int, at: int) -> np.float32:
            point = means[at].point
            product = dots(self._keys[i][None], point.vector)[0] + point.last * self._last[i]
            return np.float32(product - means[at].half)

        for i, leaves in near:
            before = best = self._page[i]
            if len(self._pages[before].members) == 1:
                continue
            most = score(i, before)
            for leaf in leaves:
                for at in self._pages_of(leaf):
                    has_room = len(self._pages[at].members) < self._page_rows
                    if at != before and has_room and score(i, at) > most:
                        best, most = at, score(i, at)
            if best != before:
                self._pages[before].members.remove(i)
                self._pages[best].members.append(i)
                self._page[i] = best

    def _pages_of(self, leaf: int) -> list[int]:
        """The pages of a point of the second level; if it has no children, its own page."""
        own = self._own_node.get(leaf)
        return [self._page[leaf]] if own is None else self._nodes[own].pages

    def _mean(self, page: _Page) -> _Mean:
        n = len(page.members)
        total, last = np.zeros(self._keys.shape[1]), 0.0
        for i in page.members:
            total += self._keys[i]
            last += float(self._last[i])
        mean = total / n / self._scale
        square = square_of(mean) + last / n * (last / n)
        point = _Query((mean / self._scale).astype(np.float32), np.float32(last / n), _NOTHING)
        return _Mean(point, np.float32(square / 2))

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
                self._nodes[-1].pages.append(self._page[i])
        return self._own_node[i]

    def _join(self, at: int, i: int) -> None:
        node = self._nodes[at]
        node.members.append(i)
        for j, line in enumerate(node.lines):
            bisect.insort(line, (float(self._projection[i][j]), i))
        self._parent[i] = node.owner
        if self._level[i] != 2:
            self._lay(node, i)
        elif i not in self._own_node:
            self._page[i] = self._open_page(i)
        else:
            self._lay(self._nodes[self._own_node[i]], i)

    def _open_page(self, i: int) -> int:
        self._pages.append(_Page(i, [i]))
        return len(self._pages) - 1

    def _lay(self, node: _Node, i: int) -> None:
        """Put a key on a page of this leaf, and split the page if it is too large."""
        if not node.pages:
            self._page[i] = self._open_page(i)
            node.pages.append(self._page[i])
            return
        pivots = [self._pages[page].pivot for page in node.pages]
        scored = self._scores(self._as_point(i), pivots)
        self._page[i] = node.pages[scored.index(min(scored))]
        page = self._pages[self._page[i]]
        page.members.append(i)
        if len(page.members) > self._page_rows:
            node.pages.append(self._split(page))

    def _split(self, page: _Page) -> int:
        """Split a page between two keys far apart: each takes the keys nearer to it. Returns the
        new page. Keys that no distance tells apart are halved in order."""
        members = page.members
        b = max(self._scores(self._as_point(page.pivot), members))[1]
        of_b = self._scores(self._as_point(b), members)
        a = max(of_b)[1]
        of_a = self._scores(self._as_point(a), members)
        is_b = [to_b[0] < to_a[0] for to_a, to_b in zip(of_a, of_b, strict=True)]
        if all(is_b) or not any(is_b):
            is_b = [j >= len(members) // 2 for j in range(len(members))]
            a, b = members[0], members[len(members) // 2]
        page.pivot, page.members = (
            a,
            [i for i, moves in zip(members, is_b, strict=True) if not moves],
        )
        self._pages.append(_Page(b, [i for i, moves in zip(members, is_b, strict=True) if moves]))
        for i in self._pages[-1].members:
            self._page[i] = len(self._pages) - 1
        return len(self._pages) - 1

    def _as_query(self, query: F32) -> _Query:
        length = math.sqrt(square_of(query))
        unit = np.zeros(self._n_dims, np.float64)
        if length > 0:
            unit = query.astype(np.float64) / length
        vector = padded((unit / self._scale).astype(np.float32)[None])[0]
        rows = padded(unit.astype(np.float32)[None])[0]
        return _Query(vector, np.float32(0), dots(self._directions, rows))

    def _as_point(self, i: int) -> _Query:
        vector = self._keys[i].astype(np.float64) / (self._scale * self._scale)
        return _Query(vector.astype(np.float32), self._last[i], self._projection[i])

    def _scores(self, query: _Query, points: list[int]) -> list[Scored]:
        last = np.array([self._last[i] for i in points], np.float32)
        scores = dots(self._keys[points], query.vector) + query.last * last
        return [(-float(score), i) for score, i in zip(scores, points, strict=True)]

    def _visit(self, node: _Node, query: _Query, wanted: int, visits: int) -> list[Scored]:
        if visits == 0 or visits >= len(node.members):
            return self._scores(query, node.members) if node.members else []
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
                found += self._scores(query, [i])
        return found

    def _nearest(
        self, query: _Query, level: int, all_levels: bool, k: int, limits: SearchLimits
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
