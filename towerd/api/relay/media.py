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

from towerd.api.http.body import decode, may_be_mended, peek_bytes, read_bytes
from towerd.api.http.keys import TENANT, TENANTS
from towerd.api.http.off_loop import by_size, count, release
from towerd.api.http.reply import encode
from towerd.api.http.request_log import log_finished, title_for
from towerd.api.http.translation import TRANSLATION
from towerd.api.relay.forward import DOWN, ask, copy, llama_server_of
from towerd.api.relay.headers import to_upstream
from towerd.api.responses.pending_response import PendingResponse, continues_something
from towerd.engine.base import Reuse
from towerd.engine.llama_server.process.upstream_client import UpstreamGone
from towerd.errors import InvalidRequest, NotSupported

if TYPE_CHECKING:  # llama.cpp is loaded with the model, after the address is listened on
    from towerd.engine.llama_server.engine import LlamaServerEngine

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
HOLDERS = ("image_url", "input_audio", "input_video", "video_url")
"""Fields of a part, each of which holds a medium or where it is."""
FETCHED = "http"
"""What llama-server takes for an address begins so."""
MESSAGES = "/v1/messages"
"""llama-server does not let these requests name a slot."""
RESPONSES = ("/v1/responses", "/responses")
_SPACE = b" \t\r\n"


def with_media(handler: Handler) -> Handler:
    """The handler for requests that generate; those with media go to llama-server."""
    return _dividing(handler, _generate)


def with_counted_media(handler: Handler) -> Handler:
    """The same for requests that only count or render."""

    async def relayed(request: web.Request, data: bytes) -> web.StreamResponse:
        return await copy(request, await _sent(request, llama_server_of(request), data))

    return _dividing(handler, relayed)


def _dividing(
    handler: Handler, relayed: Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]
) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        if not llama_server_of(request).info.has_media:
            return await handler(request)
        data = await peek_bytes(request)
        has_media = await _has_media(request, data)
        if request.path.startswith(RESPONSES):
            await _check_context(request, data, has_media=has_media)
        if not has_media:
            return await handler(request)
        return await relayed(request, await read_bytes(request))

    return handle


async def _check_context(request: web.Request, data: bytes, *, has_media: bool) -> None:
    """Raises NotSupported for a request that continues what is kept here, if either has media:
    llama-server would have to be sent what is put before it."""
    if not await asyncio.to_thread(continues_something, data):
        return
    if not has_media:
        _, whole = await PendingResponse.of(request, data)
        has_media = await _has_media(request, whole)
    if has_media:
        raise NotSupported(
            "In front of a llama-server, pictures and sounds are not kept with responses: send the "
            "whole conversation as the input of a request that continues nothing"
        )


async def forward_embeddings(request: web.Request) -> web.StreamResponse:
    """Forward what is to be embedded or ranked, which may be media, and may take any slot."""
    engine = llama_server_of(request)
    data = await _mended(await read_bytes(request))
    await _has_media(request, data)
    async with engine.holds.unpinned() as launched:
        reply = await _sent(request, engine, data)
        launched()
        return await copy(request, reply)


async def _generate(request: web.Request, data: bytes) -> web.StreamResponse:
    engine = llama_server_of(request)
    engine.availability.check()
    title = await title_for(request, data)
    if request.path == MESSAGES:
        # Reuse in a slot of llama-server's choice would tell one tenant of the others.
        fields = {"cache_prompt": False} if request.app[TENANTS].required else {}
        async with engine.holds.unpinned() as launched:
            reply = await _sent(request, engine, with_fields(data, fields))
            launched()
            return await _finish(request, reply, title)
    try:
        held = await engine.holds.hold_opaque(request[TENANT].scope)
    except UpstreamGone as error:
        engine.availability.notice(error)
        raise engine.availability.failure(DOWN) from error
    async with held as hold:
        pinned = with_fields(data, {"id_slot": hold.slot, "n_cache_reuse": 0})
        reply = await _sent(request, engine, pinned)
        hold.launched()
        hold.answering()
        return await _finish(request, reply, title)


def with_fields(document: bytes, fields: Mapping[str, Any]) -> bytes:
    """`document`, the text of a JSON object, with `fields` set and the rest of its bytes as they are: numbers
    keep their digits, unknown fields their order. llama-server, like every common JSON parser, takes the
    last of two equal keys, so they are appended. Raises ValueError if it does not end as an object does."""
    body = document.strip(_SPACE)
    if not body.endswith(b"}"):
        raise ValueError("not a JSON object")
    head = body[:-1].rstrip(_SPACE)
    if not fields:
        return body
    comma = b"" if head == b"{" else b","
    return head + comma + encode(dict(fields))[1:]


async def _finish(request: web.Request, reply: ClientResponse, title: str) -> web.StreamResponse:
    response = await copy(request, reply)
    if response.status == 200:
        log_finished(request, title, Reuse(), None)
    return response


async def _sent(request: web.Request, engine: LlamaServerEngine, data: bytes) -> ClientResponse:
    """The head of the reply to this body."""
    headers = to_upstream(request.headers, engine.upstream.auth())
    translation = request.get(TRANSLATION)
    path = request.rel_url.raw_path_qs if translation is None else translation.path
    return await ask(engine, request.method, path, headers, data)


async def _mended(data: bytes) -> bytes:
    """The body as llama-server takes it; see `towerd.wire.mended_json`."""
    if not may_be_mended(data):
        return data
    from towerd.wire import mended_json

    return await asyncio.to_thread(mended_json, data)


async def _has_media(request: web.Request, data: bytes) -> bool:
    """Whether a request has media in any form: addresses, data: URIs, and bytes in base64. What is no
    JSON has none. Raises InvalidRequest for media that would be fetched, or must not be decoded."""
    try:
        body = await decode(request, data) if data else None
    except InvalidRequest:
        return False
    if not isinstance(body, dict):
        return False
    try:
        lists = [body.get(name) for name in ("messages", "input", "prompt", "content")]
        media = await by_size(count(lists), _media, lists)
    finally:
        await release(body)
    if any(address.startswith(FETCHED) for address in media):
        raise InvalidRequest("Media are not fetched from elsewhere: send the bytes in a data: URI")
    if media:
        await asyncio.to_thread(_check_bytes, media)
    return bool(media)


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
