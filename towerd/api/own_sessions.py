"""/towerd/v1/sessions: the conversations of the caller's tenant."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from aiohttp import web

from towerd.api import fields
from towerd.api.body import read_object
from towerd.api.keys import LIMITS, TENANT, service_of
from towerd.api.query import flag, integer_query
from towerd.api.reply import json_reply
from towerd.errors import InvalidRequest


def visible_scope(request: web.Request) -> str | None:
    """The scope a caller sees: its own; the owner sees all, or the one of `?scope=`."""
    tenant = request[TENANT]
    return (request.query.get("scope") or None) if tenant.admin else tenant.scope


async def list_sessions(request: web.Request) -> web.Response:
    """The sessions used last first."""
    store = service_of(request).store
    limit = integer_query(request, "limit", 100, 1, request.app[LIMITS].page_max)
    sessions = await asyncio.to_thread(store.sessions, visible_scope(request), limit)
    return json_reply({"sessions": [asdict(session) for session in sessions]})


async def get_session(request: web.Request) -> web.Response:
    """One session with its turns; `?text=1` adds the text of its current branch."""
    service = service_of(request)
    store, name, scope = service.store, request.match_info["id"], visible_scope(request)
    info = await asyncio.to_thread(store.session, name, scope)
    turns = await asyncio.to_thread(store.turns, name, info.scope)
    out: dict[str, Any] = {"session": asdict(info), "turns": [asdict(turn) for turn in turns]}
    if flag(request, "text") or flag(request, "ids"):
        ids = await asyncio.to_thread(store.session_ids, name, info.scope)
        if flag(request, "ids"):
            out["ids"] = ids.tolist()
        if flag(request, "text"):
            raw = await service.engine.detokenize(ids.tolist())
            out["text"] = raw.decode("utf-8", "replace")
    return json_reply(out)


async def patch_session(request: web.Request) -> web.Response:
    """Set a session's title."""
    store = service_of(request).store
    body = await read_object(request)
    if body.get("title") is None:
        raise InvalidRequest("Field 'title' is required")
    title = fields.string(body, "title", "")
    name, scope = request.match_info["id"], visible_scope(request)
    info = await asyncio.to_thread(store.rename_session, name, title, scope)
    return json_reply({"session": asdict(info)})


async def delete_session(request: web.Request) -> web.Response:
    """Forget a session. Its segments go with the next gc unless another session needs them."""
    store, name = service_of(request).store, request.match_info["id"]
    await asyncio.to_thread(store.delete_session, name, visible_scope(request))
    return json_reply({"deleted": name})
