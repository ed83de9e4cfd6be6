"""Requests with pictures or sounds in front of a llama-server, which goes through them itself.

towerd knows no tokens of them: they run in a slot that is never stored. What llama-server must not get is
refused: it would fetch any address that a chat names, from this machine, so that a client could reach
the machine's own services and its network; and a file that takes gigabytes once it is decoded, or that
ends the decoder, would end the answers of all others.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import ClientResponse, web

from towerd.api.http.body import decode, peek_bytes, read_bytes
from towerd.api.http.json_text import may_be_mended
from towerd.api.http.keys import TENANT, TENANTS
from towerd.api.http.off_loop import by_size, count, release
from towerd.api.http.requests.log import log_finished, title_for
from towerd.api.relay import upstream
from towerd.api.relay.forward import copy
from towerd.api.relay.headers import to_upstream
from towerd.api.relay.splice import with_fields
from towerd.api.relay.upstream import llama_server_of
from towerd.engine.base import Reuse
from towerd.errors import InvalidRequest

if TYPE_CHECKING:  # llama.cpp is loaded with the model, after the address is listened on
    from towerd.engine.llama_server.engine import LlamaServerEngine

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
HOLDERS = ("image_url", "input_audio", "input_video", "video_url")
"""Fields of a part, each of which holds a medium or where it is."""
FETCHED = "http"
"""What llama-server takes for an address begins so."""
LABEL = "media"
MESSAGES = "/v1/messages"
"""llama-server does not let these requests name a slot."""


def with_media(handler: Handler) -> Handler:
    """The handler for requests that generate; those with media go to llama-server."""

    async def handle(request: web.Request) -> web.StreamResponse:
        data = await _peek_media(request)
        return await handler(request) if data is None else await _generate(request, data)

    return handle


def with_counted_media(handler: Handler) -> Handler:
    """The same for requests that only count or render."""

    async def handle(request: web.Request) -> web.StreamResponse:
        data = await _peek_media(request)
        if data is None:
            return await handler(request)
        return await _copy(request, await _sent(request, llama_server_of(request), data))

    return handle


async def forward_embeddings(request: web.Request) -> web.StreamResponse:
    """Forward what is to be embedded or ranked, which may be media, and may take any slot."""
    engine = llama_server_of(request)
    data = await _mended(await read_bytes(request))
    media = await _media_in(request, data)
    await _check(media)
    async with engine.unpinned() as unpinned:
        reply = await _sent(request, engine, data)
        unpinned.launched()
        return await _copy(request, reply)


async def _peek_media(request: web.Request) -> bytes | None:
    """The body of a request with media, once they were checked; None if it has none, or the model
    takes none. Raises InvalidRequest."""
    if not llama_server_of(request).info.has_media:
        return None
    data = await peek_bytes(request)
    media = await _media_in(request, data)
    await _check(media)
    return await read_bytes(request) if media else None


async def _generate(request: web.Request, data: bytes) -> web.StreamResponse:
    engine = llama_server_of(request)
    title = await title_for(request, data)
    if request.path == MESSAGES:
        # Reuse in a slot of llama-server's choice would tell one tenant of the others.
        fields = {"cache_prompt": False} if request.app[TENANTS].required else {}
        async with engine.unpinned() as unpinned:
            reply = await _sent(request, engine, with_fields(data, fields))
            unpinned.launched()
            return await _finish(request, reply, title)
    async with await engine.lease_opaque(request[TENANT].scope, label=LABEL) as lease:
        pinned = with_fields(data, {"id_slot": lease.slot, "n_cache_reuse": 0})
        reply = await _sent(request, engine, pinned)
        await lease.launched()
        lease.answering()
        return await _finish(request, reply, title)


async def _finish(request: web.Request, reply: ClientResponse, title: str) -> web.StreamResponse:
    response = await _copy(request, reply)
    if response.status == 200:
        log_finished(request, title, Reuse(), None)
    return response


async def _sent(request: web.Request, engine: LlamaServerEngine, data: bytes) -> ClientResponse:
    """The head of the reply to this body."""
    headers = to_upstream(request.headers, engine.upstream.auth())
    path = request.rel_url.raw_path_qs
    return await upstream.request(engine, request.method, path, headers, data)


async def _copy(request: web.Request, reply: ClientResponse) -> web.StreamResponse:
    try:
        return await copy(request, reply)
    finally:
        reply.close()


async def _mended(data: bytes) -> bytes:
    """The body as llama-server takes it; see `towerd.wire.mended_json`."""
    if not may_be_mended(data):
        return data
    from towerd.wire import mended_json

    return await asyncio.to_thread(mended_json, data)


async def _media_in(request: web.Request, data: bytes) -> list[str]:
    """The media of a request in any form: addresses, data: URIs, and bytes in base64. What is no
    JSON has none."""
    try:
        body = await decode(request, data) if data else None
    except InvalidRequest:
        return []
    if not isinstance(body, dict):
        return []
    try:
        lists = [body.get(name) for name in ("messages", "input", "prompt", "content")]
        return await by_size(count(lists), _media, lists)
    finally:
        await release(body)


async def _check(media: list[str]) -> None:
    """Raises InvalidRequest for media that would be fetched, or must not be decoded."""
    if any(address.startswith(FETCHED) for address in media):
        raise InvalidRequest("Media are not fetched from elsewhere: send the bytes in a data: URI")
    if media:
        await asyncio.to_thread(_check_bytes, media)


def _media(lists: Any) -> list[str]:
    found: list[str] = []
    for each in lists:
        items = each if isinstance(each, list) else [each]
        found += [address for part in _parts(items) for address in _addresses(part)]
        for item in items:
            data = item.get("multimodal_data") if isinstance(item, Mapping) else None
            found += [one for one in data or () if isinstance(one, str)]
    return found


def _check_bytes(media: list[str]) -> None:
    from towerd.wire import WireError, check_medium

    for each in media:
        try:  # what is no base64 is for llama-server to refuse
            check_medium(base64.b64decode(each.rpartition(",")[2]))
        except binascii.Error:
            continue
        except WireError as error:
            raise InvalidRequest(error.message) from error


def _parts(items: Any) -> Iterator[Mapping[str, Any]]:
    """The content parts of messages or input items, and those within the results of tools."""
    if not isinstance(items, list):
        return
    for item in items:
        if not isinstance(item, Mapping):
            continue
        for inner in (item.get("content"), item.get("output")):
            if isinstance(inner, list):
                yield from (part for part in inner if isinstance(part, Mapping))
                yield from _parts(inner)


def _addresses(part: Mapping[str, Any]) -> Iterator[str]:
    """Where the bytes of a part are, or the bytes themselves."""
    source = part.get("source") if part.get("type") == "image" else None  # as Anthropic has it
    for holder in (*(part.get(name) for name in HOLDERS), source):
        found = [holder.get("url"), holder.get("data")] if isinstance(holder, Mapping) else [holder]
        yield from (each for each in found if isinstance(each, str))
