"""Resumable streams, which llama-server keeps by conversation id, separated by tenant.

A client that sends `X-Conversation-Id` may leave and come back: llama-server continues generating
and replays the output. Its ids share one namespace; if there are several tenants, towerd prefixes
each id with the tenant's name.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from towerd.api.http.body import decode, read_bytes
from towerd.api.http.keys import TENANT, TENANTS
from towerd.api.http.reply import encode, json_reply
from towerd.api.proxy.exchange import CONVERSATION
from towerd.api.proxy.forward import body_of, copy, forward, send
from towerd.api.proxy.headers import to_upstream
from towerd.api.proxy.link import LINK, llama_server_of

_QUERY = "conv_id"


def prefix_of(request: web.Request) -> str:
    """The prefix of the caller's conversation ids at llama-server."""
    return f"{request[TENANT].scope}/" if request.app[TENANTS].required else ""


def with_conversation(request: web.Request, headers: CIMultiDict[str]) -> bool:
    """Prefix the conversation id in `headers`; returns whether there is one."""
    name = headers.get(CONVERSATION)
    if not name:
        return False
    headers[CONVERSATION] = prefix_of(request) + name
    return True


async def get_stream(request: web.Request) -> web.StreamResponse:
    """Replay a stream, and follow it."""
    return await _stream(request)


async def delete_stream(request: web.Request) -> web.StreamResponse:
    """End a stream."""
    return await _stream(request)


async def _stream(request: web.Request) -> web.StreamResponse:
    prefix, name = prefix_of(request), request.query.get(_QUERY)
    if not prefix or not name:
        return await forward(request)
    engine = llama_server_of(request)
    url = request.rel_url.update_query({_QUERY: prefix + name})
    reply = await send(request, engine, auth=engine.upstream.auth(), path=url.raw_path_qs)
    try:
        return await copy(request, reply)
    finally:
        reply.close()


async def post_lookup(request: web.Request) -> web.StreamResponse:
    """Which of the caller's `conversation_ids` have a stream."""
    prefix = prefix_of(request)
    if not prefix:
        return await forward(request)
    engine = llama_server_of(request)
    body = await decode(request, await read_bytes(request))
    names = body.get("conversation_ids") if isinstance(body, dict) else None
    asked = [prefix + name for name in names or () if isinstance(name, str) and name]
    headers = to_upstream(request.headers, engine.upstream.auth())
    reply = await request.app[LINK].request(
        engine, "POST", request.path, headers, encode({"conversation_ids": asked})
    )
    try:
        if reply.status != 200:
            return await copy(request, reply)
        found: list[dict[str, Any]] = msgspec.json.decode(await body_of(reply))
    finally:
        reply.close()
    return json_reply([_renamed(stream, prefix) for stream in found])


def _renamed(stream: dict[str, Any], prefix: str) -> dict[str, Any]:
    name = str(stream.get("conversation_id", ""))
    return {**stream, "conversation_id": name.removeprefix(prefix)}
