"""Forwards requests to llama-server, and replies to clients, unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from aiohttp import ClientResponse, hdrs, web
from multidict import CIMultiDict

from towerd.api.http.body import iter_bytes
from towerd.api.http.keys import TENANT
from towerd.api.http.reply import reshaped
from towerd.api.http.requests.log import log_refused
from towerd.api.relay import upstream
from towerd.api.relay.headers import to_client, to_upstream
from towerd.api.relay.refusals import final_refusal, kind_and_message, may_be_refusal
from towerd.api.relay.relay import COPY_BYTES_MAX, relay
from towerd.api.relay.relay import read as relay_read
from towerd.api.relay.splice import SlotHider
from towerd.api.relay.upstream import llama_server_of
from towerd.engine.llama_server.process.client import LOST, Lost
from towerd.errors import NotSupported, TowerdError, Unavailable

if TYPE_CHECKING:  # llama.cpp is loaded with the model, after the address is listened on
    from towerd.engine.llama_server.engine import LlamaServerEngine


async def forward(request: web.Request) -> web.StreamResponse:
    """Forward a request that needs no slot."""
    engine = llama_server_of(request)
    reply = await send(request, engine, auth=engine.upstream.auth())
    try:
        return await copy(request, reply)
    finally:
        reply.close()


async def forward_unpinned(request: web.Request) -> web.StreamResponse:
    """Forward a request that may take any slot: transcriptions, and unknown endpoints of a newer
    llama-server."""
    if request.method in ("GET", "HEAD"):
        return await forward(request)
    engine = llama_server_of(request)
    async with engine.unpinned() as unpinned:
        reply = await send(request, engine, auth=engine.upstream.auth())
        unpinned.launched()
        try:
            return await copy(request, reply)
        finally:
            reply.close()


async def send(
    request: web.Request,
    engine: LlamaServerEngine,
    *,
    auth: Mapping[str, str],
    path: str | None = None,
) -> ClientResponse:
    """Forward the request, with its body as it arrives unless it only reads; returns when the
    reply's head is there. Raises the errors of reading the body, and Unavailable."""
    headers = to_upstream(request.headers, auth)
    target = path or request.rel_url.raw_path_qs
    if not request.body_exists or request.method in ("GET", "HEAD"):
        return await upstream.request(engine, request.method, target, headers)
    if request.content_length is not None and hdrs.CONTENT_ENCODING not in request.headers:
        headers[hdrs.CONTENT_LENGTH] = str(request.content_length)
    body = _Body(iter_bytes(request))
    try:
        return await upstream.request(engine, request.method, target, headers, aiter(body))
    except TowerdError:
        if body.error is not None:
            raise body.error from None
        raise


class _Body:
    """A body that is passed on. If it cannot be read to its end, llama-server loses its connection,
    which may be noticed before the reason."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self.error: TowerdError | None = None
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._pieces:
                yield piece
        except TowerdError as error:
            self.error = error
            raise


def head_of(reply: ClientResponse, extra: Mapping[str, str] | None = None) -> web.StreamResponse:
    """A response with the reply's status and headers, plus `extra` headers."""
    headers: CIMultiDict[str] = to_client(reply.headers)
    headers.update(extra or {})
    return web.StreamResponse(status=reply.status, reason=reply.reason, headers=headers)


async def copy(
    request: web.Request, reply: ClientResponse, extra: Mapping[str, str] | None = None
) -> web.StreamResponse:
    """Forward a reply as it arrives; a refusal under a status that clients do not retry."""
    if request.method == "POST" and reply.status >= 400 and may_be_refusal(reply.content_length):
        return await _copy_failure(request, reply)

    def on_lost() -> TowerdError:
        engine = llama_server_of(request)
        error = engine.failure(LOST)
        engine.notice(error)
        return error

    tenant = request.get(TENANT)  # none for a file of the web UI, asked for without a key
    edit = None if tenant is None or tenant.sees_all else SlotHider()
    return await relay(request, reply, head_of(reply, extra), on_lost, edit)


async def _copy_failure(request: web.Request, reply: ClientResponse) -> web.StreamResponse:
    """Raises Unavailable if llama-server ended before the reply did."""
    try:
        body = await body_of(reply)
    except Unavailable as error:
        llama_server_of(request).notice(error)
        raise
    refusal = final_refusal(body) if reply.status >= 500 else None
    headers = to_client(reply.headers)
    headers.popall(hdrs.CONTENT_LENGTH, None)
    status = reply.status if refusal is None else NotSupported.status
    log_refused(request, status, *kind_and_message(refusal or body))
    shaped = reshaped(request.path, refusal or body)
    reason = reply.reason if refusal is None else None
    return web.Response(body=shaped, status=status, reason=reason, headers=headers)


async def read(reply: ClientResponse, bytes_max: int = COPY_BYTES_MAX) -> bytes:
    """As `relay.read`. Raises Unavailable if llama-server ended before the reply did."""
    try:
        return await relay_read(reply, bytes_max)
    except Lost as error:
        raise Unavailable(LOST) from error


async def body_of(reply: ClientResponse) -> bytes:
    """The whole body of a reply. Raises Unavailable."""
    chunks = []
    while chunk := await read(reply):
        chunks.append(chunk)
    return b"".join(chunks)
