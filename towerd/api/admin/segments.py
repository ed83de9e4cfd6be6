"""/towerd/v1/segments and /towerd/v1/trie: the part of the prefix tree that the caller may see."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from aiohttp import web

from towerd.api.admin.sessions import visible_scope
from towerd.api.http.keys import LIMITS, service_of
from towerd.api.http.query import flag, integer_query, segment_id
from towerd.api.http.reply import json_reply
from towerd.errors import InvalidRequest, NotFound
from towerd.store.prefix.scope import is_of, is_public
from towerd.store.segments.checkpoints import checkpoint_bytes, cut_of
from towerd.tokens import Ids, ids_array

if TYPE_CHECKING:
    from towerd.store import Node, Store
DEPTH_MAX = 200
"""Levels in one answer; each nests the JSON two deeper, and the encoder has a limit."""
_ORDERS = {"used": "last_used", "tokens": "n", "id": "id", "hits": "hits"}


def may_see(node: Node, scope: str | None) -> bool:
    """Whether a caller of `scope` (None: the owner) may see this segment."""
    return scope is None or is_public(node.scope) or is_of(node.scope, scope)


def segment_json(node: Node, store: Store) -> dict[str, Any]:
    """One segment without its tokens."""
    parent = node.parent.id if node.parent is not None else 0
    held = store.held(node)
    return {
        "id": node.id,
        "parent": parent,
        "scope": node.scope,
        "p0": node.p0,
        "p1": node.p1,
        "tokens": node.n,
        "hot": node.hot is not None,
        "warm": node.file is not None,
        "format": held.format,
        "bytes": held.nbytes,
        "boundary_bytes": checkpoint_bytes(store, node),
        "pinned": node.pinned,
        "hits": node.hits,
        "last_used": node.last_used,
        "children": len(node.children),
    }


async def list_segments(request: web.Request) -> web.Response:
    """A page of segments; `?sort=` used, tokens, hits (descending) or id."""
    store, scope = service_of(request).store, visible_scope(request)
    page_max = request.app[LIMITS].page_max
    limit = integer_query(request, "limit", 100, 1, page_max)
    offset = integer_query(request, "offset", 0, 0, 1_000_000)
    order = request.query.get("sort", "used")
    if order not in _ORDERS:
        raise InvalidRequest(f"Query parameter 'sort' must be one of {', '.join(_ORDERS)}")

    def page() -> dict[str, Any]:
        nodes = [node for node in store.nodes() if may_see(node, scope)]
        # A full sort of a big store would hold the GIL for too long.
        pick = heapq.nsmallest if order == "id" else heapq.nlargest
        shown = pick(offset + limit, nodes, key=attrgetter(_ORDERS[order]))[offset:]
        return {"segments": [segment_json(node, store) for node in shown], "total": len(nodes)}

    return json_reply(await asyncio.to_thread(page))


async def get_segment(request: web.Request) -> web.Response:
    """One segment with its path; `?text=1` adds its text, `?ids=1` its token ids."""
    service = service_of(request)
    store, scope = service.store, visible_scope(request)
    node = await asyncio.to_thread(visible_node, store, segment_id(request), scope)
    out = await asyncio.to_thread(segment_json, node, store)
    out["cut"] = await asyncio.to_thread(cut_of, store)
    out["path"] = [each.id for each in node.path()]
    out["children"] = [child.id for child in list(node.children) if may_see(child, scope)]
    ids = _run_ids(node)
    if flag(request, "ids"):
        out["ids"] = ids
    if flag(request, "text"):
        out["text"] = (await service.engine.detokenize(ids)).decode("utf-8", "replace")
    return json_reply({"segment": out})


def _run_ids(node: Node) -> list[int]:
    return memoryview(node.ids).cast("i").tolist()


def visible_node(store: Store, node_id: int, scope: str | None) -> Node:
    """The segment, if the caller may see it. Raises NotFound. Not for the event loop."""
    node = store.node(node_id)
    if not may_see(node, scope):
        raise NotFound(f"there is no segment {node_id}")
    return node


async def get_trie(request: web.Request) -> web.Response:
    """The tree below `?root=` (default: all), `?depth=` levels, at most `?limit=` segments; `?text=1`
    adds how the text of each begins."""
    service = service_of(request)
    store, scope = service.store, visible_scope(request)
    begins = service.search.reader.begins if flag(request, "text") else None
    limit = integer_query(request, "limit", 200, 1, request.app[LIMITS].page_max)
    depth = integer_query(request, "depth", DEPTH_MAX, 1, DEPTH_MAX)
    root = integer_query(request, "root", 0, 0, 2**62)

    def tree() -> dict[str, Any]:
        top = store.root if root == 0 else visible_node(store, root, scope)
        return _tree(store, top, scope, depth, limit, begins)

    return json_reply(await asyncio.to_thread(tree))


def _tree(
    store: Store,
    top: Node,
    scope: str | None,
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
            for child in sorted(parent.children, key=attrgetter("last_used"), reverse=True):
                if not may_see(child, scope):
                    continue
                if n == limit:
                    truncated = True
                    break
                n += 1
                entry = segment_json(child, store)
                entry["children"] = []
                if begins is not None:
                    entry["text"] = begins(ids_array(child.ids))
                entries.append(entry)
                below.append((child, entry["children"]))
        level = below
    truncated = truncated or any(node.children for node, _ in level)
    return {"root": top.id, "trie": root, "segments": n, "truncated": truncated}
