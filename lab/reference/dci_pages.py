"""The pages of the DCI tree: keys of one leaf that lie near each other, a limited number of them.

A key joins the page of its leaf whose pivot is nearest. A page with too many keys is split: two
keys far apart become pivots, and each takes the keys nearer to it (IceCache, figure 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.reference.dci_points import DciPoints


@dataclass(slots=True)
class _Page:
    pivot: int
    members: list[int]


class DciPages:
    """Pages of at most `rows_max` keys."""

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self._pages: list[_Page] = []
        self.of: list[int] = []
        """The page of each key; -1 until it has one."""

    def __len__(self) -> int:
        return len(self._pages)

    def grow(self, n_keys: int) -> None:
        """Note that there are `n_keys` keys; the new ones have no page."""
        self.of += [-1] * (n_keys - len(self.of))

    def open(self, i: int) -> None:
        """Put a key on a page of its own."""
        self.of[i] = len(self._pages)
        self._pages.append(_Page(i, [i]))

    def lay(self, points: DciPoints, leaf: list[int], i: int) -> None:
        """Put a key on one of the pages of its leaf, and split the page if it is too large."""
        if not leaf:
            self.open(i)
            leaf.append(self.of[i])
            return
        pivots = [self._pages[at].pivot for at in leaf]
        scored = points.scores(points.as_point(i), pivots)
        self.of[i] = leaf[scored.index(min(scored))]
        page = self._pages[self.of[i]]
        page.members.append(i)
        if len(page.members) > self._rows_max:
            leaf.append(self._split(points, page))

    def settle(self, points: DciPoints, choices: list[tuple[int, list[int]]]) -> None:
        """Move each key to the page with the nearest mean among its pages; the means are from
        before any key moved."""
        pages = {at for _, its in choices for at in its}
        means = {at: points.mean_of(self._pages[at].members) for at in pages}
        for i, its in choices:
            before = best = self.of[i]
            if len(self._pages[before].members) == 1:
                continue
            most = points.nearness(i, means[before])
            for at in its:
                has_room = len(self._pages[at].members) < self._rows_max
                if at == before or not has_room:
                    continue
                here = points.nearness(i, means[at])
                if here > most:
                    best, most = at, here
            if best != before:
                self._pages[before].members.remove(i)
                self._pages[best].members.append(i)
                self.of[i] = best

    def check_integrity(self) -> None:
        """RuntimeError if a key is not on exactly one page, or a page holds too many or none."""
        if any(not 0 < len(page.members) <= self._rows_max for page in self._pages):
            raise RuntimeError("a page holds too many rows or none")
        for at, page in enumerate(self._pages):
            if any(self.of[i] != at for i in page.members):
                raise RuntimeError("a point is on another page")
        if sum(len(page.members) for page in self._pages) != len(self.of):
            raise RuntimeError("a point is not on exactly one page")

    def _split(self, points: DciPoints, page: _Page) -> int:
        """Split a page between two keys far apart: each takes the keys nearer to it. Returns the
        new page. Keys that no distance tells apart are halved in order."""
        members = page.members
        b = max(points.scores(points.as_point(page.pivot), members))[1]
        of_b = points.scores(points.as_point(b), members)
        a = max(of_b)[1]
        of_a = points.scores(points.as_point(a), members)
        is_b = [to_b[0] < to_a[0] for to_a, to_b in zip(of_a, of_b, strict=True)]
        if all(is_b) or not any(is_b):
            is_b = [j >= len(members) // 2 for j in range(len(members))]
            a, b = members[0], members[len(members) // 2]
        page.pivot = a
        page.members = [i for i, moves in zip(members, is_b, strict=True) if not moves]
        self._pages.append(_Page(b, [i for i, moves in zip(members, is_b, strict=True) if moves]))
        for i in self._pages[-1].members:
            self.of[i] = len(self._pages) - 1
        return len(self._pages) - 1
