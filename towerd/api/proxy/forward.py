"""Requests that go to llama-server as they are, and come back as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import ClientResponse, hdrs, web
from multidict import CIMultiDict

from towerd.api.http.body import iter_bytes
from towerd.api.http.keys import TENANT
from towerd.api.http.reply import encode, error_event
from towerd.api.http.sse import write_or_stall
from towerd.api.proxy.headers import to_client, to_upstream
from towerd.api.proxy.link import LINK, LOST, Sidecar, sidecar_of
from towerd.engine.llama_server.process import client
from towerd.engine.llama_server.process.client import Lost
from towerd.errors import TowerdError, Unavailable

EVENT_STREAM = "text/event-stream"
COPY_BYTES_MAX = 256 * 1024
"""Of a reply that only passes through, in one step of the event loop."""


async def forward(request: web.Request) -> web.StreamResponse:
    """Pass one request through that takes no slot."""
    engine = sidecar_of(request)
    reply = await send(request, engine, auth=engine.upstream.auth())
    try:
        return await copy(request, reply)
    finally:
        reply.close()


async def forward_unpinned(request: web.Request) -> web.StreamResponse:
    """Pass one request through that may take any slot: embeddings, reranking, transcriptions,
    and whatever a newer llama-server has that is not known here."""
    if request.method in ("GET", "HEAD"):
        return await forward(request)
    engine = sidecar_of(request)
    async with engine.unpinned(request[TENANT].scope) as unpinned:
        reply = await send(request, engine, auth=engine.upstream.auth())
        unpinned.launched()
        try:
            return await copy(request, reply)
        finally:
            reply.close()


async def send(
    request: web.Request, engine: Sidecar, *, auth: Mapping[str, str], path: str | None = None
) -> ClientResponse:
    """Send the request on, its body as it arrives; returns when the reply's head is there.

    Raises what reading the body raises, and Unavailable."""
    headers = to_upstream(request.headers, auth)
    link = request.app[LINK]
    target = path or request.rel_url.raw_path_qs
    if not request.body_exists:
        return await link.request(engine, request.method, target, headers)
    if request.content_length is not None and hdrs.CONTENT_ENCODING not in request.headers:
        headers[hdrs.CONTENT_LENGTH] = str(request.content_length)
    return await link.request(engine, request.method, target, headers, iter_bytes(request))


def head_of(reply: ClientResponse, extra: Mapping[str, str] | None = None) -> web.StreamResponse:
    """A response with the reply's status and headers, and `extra` ones."""
    headers: CIMultiDict[str] = to_client(reply.headers)
    headers.update(extra or {})
    return web.StreamResponse(status=reply.status, reason=reply.reason, headers=headers)


async def copy(
    request: web.Request, reply: ClientResponse, extra: Mapping[str, str] | None = None
) -> web.StreamResponse:
    """Pass a reply on as it arrives."""
    response = head_of(reply, extra)
    await response.prepare(request)
    try:
        while chunk := await read(reply):
            await write_or_stall(request, response, chunk)
    except Unavailable as error:
        sidecar_of(request).notice(error)
        await cut_off(request, response, error)
    await response.write_eof()
    return response


async def read(reply: ClientResponse, bytes_max: int = COPY_BYTES_MAX) -> bytes:
    """What has arrived of a reply's body, at least one byte; none at its end. When more than
    `bytes_max` has, others get their turn before the rest is read.

    Raises Unavailable when llama-server ended before the reply did."""
    try:
        chunk = await client.read(reply, bytes_max)
    except Lost as error:
        raise Unavailable(LOST) from error
    if len(chunk) == bytes_max:
        await asyncio.sleep(0)
    return chunk


async def cut_off(request: web.Request, response: web.StreamResponse, error: TowerdError) -> None:
    """Tell a client that what it got is not all: as an event if it reads events, else by cutting
    its connection. Raises ConnectionResetError."""
    if response.content_type != EVENT_STREAM:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(error.message) from error
    await write_or_stall(request, response, b"data: %s\n\n" % encode(error_event(error)))


async def body_of(reply: ClientResponse) -> bytes:
    """The whole body of a reply. Raises Unavailable."""
    chunks = []
    while chunk := await read(reply):
        chunks.append(chunk)
    return b"".join(chunks)
