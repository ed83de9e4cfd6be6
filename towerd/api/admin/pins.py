"""/towerd/v1/pins and /towerd/v1/bases: segments kept from eviction. For the owner only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiohttp import web

from towerd.api.admin.segments import segment_id, segment_json
from towerd.api.http import fields
from towerd.api.http.access import own_scope, require_admin
from towerd.api.http.body import read_object
from towerd.api.http.keys import TENANT, service_of
from towerd.api.http.numbers import numbers_of
from towerd.api.http.reply import json_reply
from towerd.errors import InvalidRequest, SessionFrozen
from towerd.store.tree.scope import is_of, is_public, public_of

if TYPE_CHECKING:
    from towerd.store import Base, Store


async def list_pins(request: web.Request) -> web.Response:
    """The pinned segments."""
    require_admin(request)
    store = service_of(request).store

    def work() -> list[dict[str, Any]]:
        return [segment_json(node, store) for node in store.pins.listing()]

    return json_reply({"pins": await asyncio.to_thread(work)})


async def post_pin(request: web.Request) -> web.Response:
    """Pin a segment and its path, by `segment` id or by `session` (its newest turn)."""
    require_admin(request)
    store = service_of(request).store
    body = await read_object(request)
    if (body.get("segment") is None) == (body.get("session") is None):
        raise InvalidRequest("Exactly one of 'segment' and 'session' is required")
    if body.get("segment") is not None:
        node_id = fields.integer_in(body, ("segment",), 0, 1, 2**62)
    else:
        session = fields.string(body, "session", "")
        node_id = await asyncio.to_thread(_leaf, store, session)

    def work() -> dict[str, Any]:
        store.pins.add(node_id)
        return segment_json(store.node(node_id), store)

    return json_reply({"pinned": await asyncio.to_thread(work)})


def _leaf(store: Store, session: str) -> int:
    """The segment at which a session's current branch ends. Raises NotFound, InvalidRequest,
    SessionFrozen."""
    if store.session(session).cold_bytes:
        raise SessionFrozen(f"Session {session!r} is frozen: thaw it with towerctl thaw first.")
    current = [turn for turn in store.turns(session) if turn.current]
    if not current or not current[-1].reply_node:
        raise InvalidRequest(f"session {session!r} has no stored tokens yet")
    return current[-1].reply_node


async def delete_pin(request: web.Request) -> web.Response:
    """Unpin a segment."""
    require_admin(request)
    store, node_id = service_of(request).store, segment_id(request)
    await asyncio.to_thread(store.pins.remove, node_id)
    return json_reply({"unpinned": node_id})


def base_json(base: Base) -> dict[str, Any]:
    """Describe a precached prompt."""
    return {
        "name": base.name,
        "scope": base.scope,
        "public": is_public(base.scope),
        "level": base.level,
        "format": base.format,
        "reuse": base.reuse,
        "segment": base.node,
        "tokens": base.n_tokens,
        "digest": base.digest.hex(),
    }


async def list_bases(request: web.Request) -> web.Response:
    """The precached prompts the caller can use."""
    tenant = request[TENANT]
    bases = await asyncio.to_thread(service_of(request).store.bases.listing)
    shown = [b for b in bases if tenant.admin or is_public(b.scope) or is_of(b.scope, tenant.scope)]
    numbers = await numbers_of(request)
    bases_json = [numbers.with_shown(base_json(base), ("segment",)) for base in shown]
    return json_reply({"bases": bases_json})


async def delete_base(request: web.Request) -> web.Response:
    """Remove a base's name and pin; `?scope=` (default: public) selects the owner."""
    require_admin(request)
    store, name = service_of(request).store, request.match_info["name"]
    scope = request.query.get("scope") or public_of(own_scope(request))
    await asyncio.to_thread(store.bases.remove, name, scope)
    return json_reply({"deleted": name})
