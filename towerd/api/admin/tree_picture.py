"""GET /towerd/v1/tree: the prefix tree as boxes by their size, for a picture of it.

What lies in a line, segment after segment without a branch, is one box. Boxes that would be too small to be seen
are counted together, so that a picture of any tree is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from aiohttp import web

from towerd.api.admin.segments import Viewer, viewer_of
from towerd.api.http.fields import flag, integer_query
from towerd.api.http.keys import service_of
from towerd.api.http.reply import encode, raw_reply
from towerd.store import Node
from towerd.tokens import Ids, ids_array

DEPTH = 24
"""Branchings below each other in one picture."""
PARTS_MAX = 4000
GROUP = 8
"""A group of small ones is as large as this many boxes of the least size, where there are enough."""
ID_MAX = 2**62


async def get_tree(request: web.Request) -> web.Response:
    """The tree below `?root=` (default: all) and that segment: boxes that have at least one of `?parts=` of all its
    tokens; with `?from=` and `?boxes=` so many of those that continue that segment, from that one on; `?text=1`
    adds how the text of each begins."""
    service = service_of(request)
    store, viewer = service.store, await viewer_of(request)
    begins = service.search.reader.begins if flag(request, "text") else None
    parts = integer_query(request, "parts", 400, 1, PARTS_MAX)
    root = integer_query(request, "root", 0, 0, ID_MAX)
    first = integer_query(request, "from", 0, 0, ID_MAX)
    n = integer_query(request, "boxes", 0, 0, ID_MAX)

    def made() -> bytes:
        top = store.state.tree.root if root == 0 else viewer.node(store, root)
        below = viewer.children(top) if root == 0 or n else [top]
        picture = _Picture(viewer, begins, below)
        tops = picture.ranked(below)[first : first + n] if n else below
        return encode({"root": root, "from": first, **picture.json(top, tops, parts)})

    return raw_reply(await asyncio.to_thread(made))


@dataclass(slots=True)
class _Size:
    """Of a segment with all below it, or of several: `places` has the tokens in RAM, on disk alone, and without
    rows."""

    tokens: int = 0
    segments: int = 0
    places: list[int] = field(default_factory=lambda: [0, 0, 0])

    def add(self, other: _Size) -> None:
        self.tokens += other.tokens
        self.segments += other.segments
        self.places = [a + b for a, b in zip(self.places, other.places, strict=True)]

    def json(self) -> dict[str, Any]:
        names = ("hot", "warm", "none")
        return {"tokens": self.tokens, "segments": self.segments} | dict(
            zip(names, self.places, strict=True)
        )


def _own(node: Node) -> _Size:
    place = 0 if node.hot is not None else 1 if node.file is not None else 2
    return _Size(node.n, 1, [node.n if i == place else 0 for i in range(3)])


class _Picture:
    """The segments below some, with the size of what is below each."""

    def __init__(
        self, viewer: Viewer, begins: Callable[[Ids], str] | None, tops: list[Node]
    ) -> None:
        self._viewer = viewer
        self._begins = begins
        self._tops = tops
        self._children: dict[int, list[Node]] = {}
        self._sizes: dict[int, _Size] = {}
        order = list(tops)
        for node in order:  # grows while it is read
            children = self._children[node.id] = viewer.children(node)
            order += children
        for node in reversed(order):
            size = self._sizes[node.id] = _own(node)
            for child in self._children[node.id]:
                size.add(self._sizes[child.id])

    def ranked(self, nodes: Iterable[Node]) -> list[Node]:
        """Segments beside each other, the largest first."""
        return sorted(nodes, key=lambda node: (-self._sizes[node.id].tokens, node.id))

    def json(self, parent: Node, tops: list[Node], parts: int) -> dict[str, Any]:
        """All of it, with boxes of at least one of so many parts."""
        whole = self._sum(tops)
        least = max(1, whole.tokens // parts)
        return {**whole.json(), "least": least, **self._below(parent, tops, least, DEPTH)}

    def _sum(self, nodes: Iterable[Node]) -> _Size:
        size = _Size()
        for node in nodes:
            size.add(self._sizes[node.id])
        return size

    def _below(self, parent: Node, nodes: list[Node], least: int, depth: int) -> dict[str, Any]:
        """The boxes of segments below one, and in groups what is too small or too deep."""
        ranked = self.ranked(nodes)
        n = sum(self._sizes[node.id].tokens >= least for node in ranked) if depth else 0
        return {
            "boxes": [self._box(node, least, depth - 1) for node in ranked[:n]],
            "groups": list(self._groups(parent, ranked, n, least))
            if depth
            else [self._group(parent, 0, ranked)][: len(ranked)],
        }

    def _groups(
        self, parent: Node, ranked: list[Node], n: int, least: int
    ) -> Iterator[dict[str, Any]]:
        """Segments from the n-th on, so many together that a box of them is well seen."""
        starts, tokens = [n], 0
        for place in range(n, len(ranked)):
            if tokens >= GROUP * least:
                starts.append(place)
                tokens = 0
            tokens += self._sizes[ranked[place].id].tokens
        if len(starts) > 1 and tokens < least:
            starts.pop()
        for start, end in pairwise([*starts, len(ranked)]):
            if start < end:
                yield self._group(parent, start, ranked[start:end])

    def _group(self, parent: Node, first: int, nodes: list[Node]) -> dict[str, Any]:
        root = self._viewer.numbers.shown(parent.id)
        return {"root": root, "from": first, "boxes": len(nodes), **self._sum(nodes).json()}

    def _box(self, first: Node, least: int, depth: int) -> dict[str, Any]:
        line, own = [first], _own(first)
        while len(children := self._children[line[-1].id]) == 1:
            line.append(children[0])
            own.add(_own(children[0]))
        numbers, size = self._viewer.numbers, self._sizes[first.id]
        box = {
            "id": numbers.shown(first.id),
            "last": numbers.shown(line[-1].id),
            "p0": first.p0,
            "own": own.json(),
            "tokens": size.tokens,
            "segments": size.segments,
            "pinned": any(node.pinned for node in line),
            **self._below(line[-1], children, least, depth),
        }
        if self._begins is not None:
            box["text"] = self._begins(ids_array(first.ids))
        return box
