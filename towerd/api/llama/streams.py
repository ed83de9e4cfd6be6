"""/v1/stream: streams that a client resumes or stops by their `X-Conversation-Id`."""

from __future__ import annotations

from aiohttp import web

from towerd.api.http.body import decode, read_bytes
from towerd.api.http.kept_stream import KeptStream, Key
from towerd.api.http.keys import STREAMS, TENANT, service_of
from towerd.api.http.reply import json_reply
from towerd.api.http.sse import EventStream
from towerd.errors import InvalidRequest, NotFound

CONVERSATION = "X-Conversation-Id"
NAME_CHARS_MAX = 1024
NAMES_MAX = 4096
"""Conversations that one request may ask for."""


def key_of(request: web.Request, name: str) -> Key:
    """The key of the caller's conversation id. Raises InvalidRequest."""
    if len(name) > NAME_CHARS_MAX or not name.isprintable():
        raise InvalidRequest(
            f"A conversation id must be at most {NAME_CHARS_MAX} printable characters"
        )
    return request[TENANT].scope, name


async def get_stream(request: web.Request) -> web.StreamResponse:
    """Replay a stream from byte `from` on, and follow it."""
    service_of(request)
    stream = request.app[STREAMS].get(key_of(request, _name(request)))
    if stream is None:
        raise NotFound("Stream not found or expired")
    start = request.query.get("from") or "0"
    if not (start.isascii() and start.isdecimal() and len(start) < 20):
        raise InvalidRequest("Invalid 'from' offset")
    if int(start) < stream.n_dropped:
        raise InvalidRequest("Stream offset lost, please restart")
    return await follow(request, stream, int(start))


async def delete_stream(request: web.Request) -> web.StreamResponse:
    """End and remove a stream. Answers 204 even if there is none."""
    request.app[STREAMS].stop(key_of(request, _name(request)))
    return web.Response(status=204)


async def post_lookup(request: web.Request) -> web.StreamResponse:
    """Which of `conversation_ids` have a stream."""
    body = await decode(request, await read_bytes(request))
    names = body.get("conversation_ids") if isinstance(body, dict) else None
    asked = (
        [name for name in names if name and isinstance(name, str)]
        if isinstance(names, list)
        else []
    )
    if len(asked) > NAMES_MAX:
        raise InvalidRequest(f"Field 'conversation_ids': at most {NAMES_MAX} are allowed")
    found = request.app[STREAMS].find(request[TENANT].scope, asked)
    return json_reply([_listed(name, stream) for name, stream in found])


async def follow(request: web.Request, stream: KeptStream, start: int) -> web.StreamResponse:
    """Write a stream to a client. The stream continues if the client leaves."""
    events = EventStream(request)
    await events.open(await stream.headers())
    async for data in stream.read(start):
        await events.write(data)
    await events.close()
    return events.response


def _name(request: web.Request) -> str:
    name = request.query.get("conv_id")
    if not name:
        raise InvalidRequest("Missing conversation id in path")
    return name


def _listed(name: str, stream: KeptStream) -> dict[str, object]:
    return {
        "conversation_id": name,
        "is_done": stream.is_done,
        "total_bytes": stream.n_bytes,
        "started_at": stream.started_s,
        "completed_at": stream.completed_s,
    }
