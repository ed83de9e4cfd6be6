"""Refuses media that llama-server must not get: addresses, which it would fetch, and bombs.

It asks any address that a chat names, from this machine. A client could reach the machine's own services
and its network that way, or be led there by a redirect: neither engine fetches anything. A file that
takes gigabytes once it is decoded, or that ends the decoder, would end the answers of all others.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any

from aiohttp import ClientResponse, web

from towerd.api.http.body import decode, read_bytes
from towerd.api.http.off_loop import by_size, count, release
from towerd.api.proxy.forward import copy
from towerd.api.proxy.headers import to_upstream
from towerd.api.proxy.link import LINK, llama_server_of
from towerd.api.proxy.mending import mended_chat, mended_text
from towerd.engine.llama_server.engine import LlamaServerEngine
from towerd.errors import InvalidRequest

HOLDERS = ("image_url", "input_audio", "input_video", "video_url")
"""Fields of a part, each of which holds a medium or where it is."""
FETCHED = "http"
"""What llama-server takes for an address begins so."""


async def check_media(body: Any) -> None:
    """Raises InvalidRequest if a request, in any of its forms, has media that would be fetched or must
    not be decoded."""
    if not isinstance(body, Mapping):
        return
    lists = [body.get(name) for name in ("messages", "input", "prompt", "content")]
    found = await by_size(count(lists), _media, lists)
    if any(address.startswith(FETCHED) for address in found):
        raise InvalidRequest("Media are not fetched from elsewhere: send the bytes in a data: URI")
    if found:
        await asyncio.to_thread(_check_bytes, found)


async def forward_chat(request: web.Request) -> web.StreamResponse:
    """Forward a chat that is only counted or rendered: llama-server fetches its media all the same."""
    engine = llama_server_of(request)
    data = await mended_chat(request, await read_bytes(request), engine)
    return await _copy(request, await _sent(request, engine, data))


async def forward_embeddings(request: web.Request) -> web.StreamResponse:
    """Forward what is to be embedded, which may be media, and may take any slot."""
    engine = llama_server_of(request)
    data = await mended_text(request, await read_bytes(request), engine)
    async with engine.unpinned() as unpinned:
        reply = await _sent(request, engine, data)
        unpinned.launched()
        return await _copy(request, reply)


async def _sent(request: web.Request, engine: LlamaServerEngine, data: bytes) -> ClientResponse:
    """The head of the reply to a body whose media were checked. Raises InvalidRequest."""
    body = await decode(request, data) if data else None
    try:
        await check_media(body)
    finally:
        if isinstance(body, dict):
            await release(body)
    headers = to_upstream(request.headers, engine.upstream.auth())
    path = request.rel_url.raw_path_qs
    return await request.app[LINK].request(engine, request.method, path, headers, data)


async def _copy(request: web.Request, reply: ClientResponse) -> web.StreamResponse:
    try:
        return await copy(request, reply)
    finally:
        reply.close()


def _media(lists: Any) -> list[str]:
    """The media of a request: addresses, data: URIs, and bytes in base64."""
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
