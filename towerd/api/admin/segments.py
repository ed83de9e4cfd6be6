"""/towerd/v1/segments and /towerd/v1/trie: the part of the prefix tree that the caller may see, and why a
segment is where it is."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from aiohttp import web

from towerd.api.http.access import require_overview, visible_scope
from towerd.api.http.fields import flag, integer_query
from towerd.api.http.keys import LIMITS, TENANT, service_of
from towerd.api.http.numbers import PLAIN, Numbers, numbers_of
from towerd.api.http.reply import json_reply
from towerd.errors import InvalidRequest, NotFound
from towerd.store.rows.checkpoints import checkpoint_bytes, cut_of
from towerd.store.tree.scope import is_of, is_public
from towerd.tokens import Ids, ids_array

if TYPE_CHECKING:
    from towerd.store import Node, Store
DEPTH_MAX = 200
"""Levels in one answer; each nests the JSON two deeper, and the encoder has a limit."""
_ORDERS = {"used": "last_used", "tokens": "n", "id": "id", "hits": "hits"}


@dataclass(frozen=True, slots=True)
class Viewer:
    """What a caller may see of the prefix tree."""

    scope: str | None
    """Whose segments are shown, beside public ones; None: all."""
    sees_all: bool
    """Also how much all tenants use a public segment, and when."""
    numbers: Numbers = PLAIN
    """By which it knows segments."""

    def may_see(self, node: Node) -> bool:
        """Whether this segment is shown."""
        return self.scope is None or is_public(node.scope) or is_of(node.scope, self.scope)

    def may_see_uses(self, node: Node) -> bool:
        """Whether it is shown how often and when a segment was used."""
        return self.sees_all or not is_public(node.scope)

    def last_used(self, node: Node) -> float:
        """When a segment was used (Unix time); 0 where that is not shown."""
        return node.last_used if self.may_see_uses(node) else 0.0

    def children(self, node: Node) -> list[Node]:
        """The segments below one that are shown."""
        return [child for child in list(node.children) if self.may_see(child)]

    def node(self, store: Store, number: int) -> Node:
        """The segment that is shown under a number. Raises NotFound. Not for the event loop."""
        node = None
        with suppress(NotFound):
            node = store.node(self.numbers.real(number))
        if node is None or not self.may_see(node):
            raise NotFound(f"there is no segment {number}")
        return node


OWNER_VIEW = Viewer(None, True)


async def viewer_of(request: web.Request) -> Viewer:
    """What the caller may see."""
    numbers = await numbers_of(request)
    return Viewer(visible_scope(request), request[TENANT].sees_all, numbers)


def segment_id(request: web.Request) -> int:
    """The segment id in the request's path. Raises NotFound."""
    raw = request.match_info["id"]
    if not raw.isdecimal() or len(raw) > 18:
        raise NotFound(f"there is no segment {raw[:50]!r}")
    return int(raw)


def segment_json(node: Node, store: Store, viewer: Viewer = OWNER_VIEW) -> dict[str, Any]:
    """One segment without its tokens."""
    parent = node.parent.id if node.parent is not None else 0
    held = store.held(node)
    has_uses = viewer.may_see_uses(node)
    n_checkpoint = checkpoint_bytes(store.state, node)
    return {
        "id": viewer.numbers.shown(node.id),
        "parent": viewer.numbers.shown(parent),
        "scope": node.scope,
        "p0": node.p0,
        "p1": node.p1,
        "tokens": node.n,
        "hot": node.hot is not None,
        "warm": node.file is not None,
        "format": held.format,
        "bytes": held.nbytes,
        "checkpoint_bytes": n_checkpoint,
        "boundary_bytes": n_checkpoint,  # its name in the last release
        "pinned": node.pinned,
        "hits": node.hits if has_uses else None,
        "last_used": node.last_used if has_uses else None,
        "children": len(viewer.children(node)),
    }


async def list_segments(request: web.Request) -> web.Response:
    """A page of segments; `?sort=` used, tokens, hits (descending) or id."""
    store, viewer = service_of(request).store, await viewer_of(request)
    page_max = request.app[LIMITS].page_max
    limit = integer_query(request, "limit", 100, 1, page_max)
    offset = integer_query(request, "offset", 0, 0, 1_000_000)
    order = request.query.get("sort", "used")
    if order not in _ORDERS:
        raise InvalidRequest(f"Query parameter 'sort' must be one of {', '.join(_ORDERS)}")

    by = attrgetter(_ORDERS[order])

    def place(node: Node) -> float:
        is_told = order in ("tokens", "id") or viewer.may_see_uses(node)
        return float(by(node)) if is_told else 0.0

    def page() -> dict[str, Any]:
        nodes = [node for node in store.nodes() if viewer.may_see(node)]
        # A full sort of a big store would hold the GIL for too long.
        pick = heapq.nsmallest if order == "id" else heapq.nlargest
        shown = pick(offset + limit, nodes, key=place)[offset:]
        found = [segment_json(node, store, viewer) for node in shown]
        return {"segments": found, "total": len(nodes)}

    return json_reply(await asyncio.to_thread(page))


async def get_segment(request: web.Request) -> web.Response:
    """One segment with its path; `?text=1` adds its text, `?ids=1` its token ids."""
    service = service_of(request)
    store, viewer = service.store, await viewer_of(request)
    node = await asyncio.to_thread(viewer.node, store, segment_id(request))
    out = await asyncio.to_thread(segment_json, node, store, viewer)
    out["cut"] = await asyncio.to_thread(cut_of, store.state)
    out["path"] = [viewer.numbers.shown(each.id) for each in node.path()]
    out["children"] = [viewer.numbers.shown(child.id) for child in viewer.children(node)]
    ids = _run_ids(node)
    if flag(request, "ids"):
        out["ids"] = ids
    if flag(request, "text"):
        out["text"] = (await service.engine.detokenize(ids)).decode("utf-8", "replace")
    return json_reply({"segment": out})


def _run_ids(node: Node) -> list[int]:
    return memoryview(node.ids).cast("i").tolist()


async def get_trie(request: web.Request) -> web.Response:
    """The tree below `?root=` (default: all), `?depth=` levels, at most `?limit=` segments; `?text=1`
    adds how the text of each begins."""
    service = service_of(request)
    store, viewer = service.store, await viewer_of(request)
    begins = service.search.reader.begins if flag(request, "text") else None
    limit = integer_query(request, "limit", 200, 1, request.app[LIMITS].page_max)
    depth = integer_query(request, "depth", DEPTH_MAX, 1, DEPTH_MAX)
    root = integer_query(request, "root", 0, 0, 2**62)

    def tree() -> dict[str, Any]:
        top = store.state.tree.root if root == 0 else viewer.node(store, root)
        return _tree(store, top, viewer, depth, limit, begins)

    return json_reply(await asyncio.to_thread(tree))


def _tree(
    store: Store,
    top: Node,
    viewer: Viewer,
    depth: int,
    limit: int,
    begins: Callable[[Ids], str] | None,
) -> dict[str, Any]:
    """The tree in breadth-first order, so that a truncated tree shows its upper levels."""
    root: list[dict[str, Any]] = []
    level: list[tuple[Node, list[dict[str, Any]]]] = [(top, root)]
    n, truncated = 0, False
    for _ in range(depth):
        below: list[tuple[Node, list[dict[str, Any]]]] = []
        for parent, entries in level:
            for child in sorted(viewer.children(parent), key=viewer.last_used, reverse=True):
                if n == limit:
                    truncated = True
                    break
                n += 1
                entry = segment_json(child, store, viewer)
                entry["children"] = []
                if begins is not None:
                    entry["text"] = begins(ids_array(child.ids))
                entries.append(entry)
                below.append((child, entry["children"]))
        level = below
    truncated = truncated or any(viewer.children(node) for node, _ in level)
    return {
        "root": viewer.numbers.shown(top.id),
        "trie": root,
        "segments": n,
        "truncated": truncated,
    }


async def get_why(request: web.Request) -> web.Response:
    """How the policies rank one segment: score, prediction, pin and place."""
    service = service_of(request)
    number, viewer = segment_id(request), await viewer_of(request)

    def why() -> dict[str, Any]:
        node = viewer.node(service.store, number)
        if not viewer.may_see_uses(node):
            require_overview(request)
        segment = segment_json(node, service.store, viewer)
        return {"segment": segment, "why": _shown(service.tiers.ranking.explain(node), viewer)}

    return json_reply(await asyncio.to_thread(why))


def _shown(why: dict[str, Any], viewer: Viewer) -> dict[str, Any]:
    """Without what counts the segments of all tenants, unless the caller sees what all do."""
    if viewer.sees_all:
        return why
    for tier in ("hot", "warm"):
        if why[tier] is not None:
            why[tier] = {**why[tier], "place": None}
    return {**why, "n_hot": None, "n_warm": None}
