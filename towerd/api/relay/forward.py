"""Forwards requests to llama-server, and replies to clients, unchanged.

But a refusal that the same request will meet again goes under a status that clients do not retry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

from aiohttp import ClientResponse, hdrs, web

from towerd.api.http.body import iter_bytes
from towerd.api.http.keys import TENANT, service_of
from towerd.api.http.reply import encode, error_body, reshaped
from towerd.api.http.request_log import log_refused
from towerd.api.http.translation import NDJSON, TRANSLATION, Translation, whole_reply
from towerd.api.relay import relay
from towerd.api.relay.headers import to_client, to_upstream
from towerd.api.relay.relay import SlotHider
from towerd.engine.llama_server.process.client import (
    LOST,
    Body,
    Lost,
    NotHttp,
    Unreachable,
    read_all,
)
from towerd.errors import NotSupported, TowerdError, Unavailable

if TYPE_CHECKING:  # llama.cpp is loaded with the model, after the address is listened on
    from towerd.engine.llama_server.engine import LlamaServerEngine


_BAD_HTTP = "llama-server's reply is not valid HTTP"
DOWN = "llama-server is not running at the moment; try again"
REFUSAL_BYTES_MAX = 64 * 1024
"""No error of llama-server is larger."""
_FINAL = (
    "is not supported - hint",
    "does not support",
    "is too large to process",
    "Failed to parse ",
)
"""Parts of the messages that llama-server sends with 500 though they are about the request."""


def llama_server_of(request: web.Request) -> LlamaServerEngine:
    """The engine behind the proxy; see `service_of`."""
    return cast("LlamaServerEngine", service_of(request).engine)


async def ask(
    engine: LlamaServerEngine,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: Body = None,
) -> ClientResponse:
    """Send one request unchanged (`path` is quoted, with its query) and return when the reply's
    head is there. Raises Unavailable if llama-server is unavailable, TowerdError if its reply
    cannot be read, and the errors of iterating the body."""
    if not engine.availability.is_running:
        raise engine.availability.failure(DOWN)
    try:
        return await engine.upstream.send(method, path, headers, body)
    except NotHttp as error:
        raise TowerdError(_BAD_HTTP) from error
    except (Lost, Unreachable) as error:
        failure = engine.availability.failure(LOST if isinstance(error, Lost) else DOWN)
        # llama-server closes the connection on a body that it refuses; it may still be well.
        if not isinstance(body, AsyncIterator):
            engine.availability.notice(failure)
        raise failure from error


async def forward(request: web.Request) -> web.StreamResponse:
    """Forward a request that needs no slot."""
    engine = llama_server_of(request)
    return await copy(request, await send(request, engine, auth=engine.upstream.auth()))


async def forward_unpinned(request: web.Request) -> web.StreamResponse:
    """Forward a request that may take any slot: transcriptions, and unknown endpoints of a newer
    llama-server."""
    if request.method in ("GET", "HEAD"):
        return await forward(request)
    engine = llama_server_of(request)
    async with engine.holds.unpinned() as launched:
        reply = await send(request, engine, auth=engine.upstream.auth())
        launched()
        return await copy(request, reply)


async def send(
    request: web.Request, engine: LlamaServerEngine, *, auth: Mapping[str, str]
) -> ClientResponse:
    """Forward the request, with its body as it arrives unless it only reads; returns when the
    reply's head is there. Raises the errors of reading the body, and Unavailable."""
    headers = to_upstream(request.headers, auth)
    target = request.rel_url.raw_path_qs
    if not request.body_exists or request.method in ("GET", "HEAD"):
        return await ask(engine, request.method, target, headers)
    if request.content_length is not None and hdrs.CONTENT_ENCODING not in request.headers:
        headers[hdrs.CONTENT_LENGTH] = str(request.content_length)
    body = _Body(iter_bytes(request))
    try:
        return await ask(engine, request.method, target, headers, aiter(body))
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


async def copy(request: web.Request, reply: ClientResponse) -> web.StreamResponse:
    """Forward a reply as it arrives, and close it; a refusal under a status that clients do not
    retry."""
    try:
        n_bytes = reply.content_length
        is_small = n_bytes is not None and n_bytes <= REFUSAL_BYTES_MAX
        if request.method == "POST" and reply.status >= 400 and is_small:
            return await _copy_failure(request, reply)
        if (translation := request.get(TRANSLATION)) is not None and reply.status == 200:
            return await _translated(request, reply, translation)
        response = web.StreamResponse(
            status=reply.status, reason=reply.reason, headers=to_client(reply.headers)
        )
        tenant = request.get(TENANT)  # none for a file of the web UI, asked for without a key
        hider = None if tenant is None or tenant.sees_all else SlotHider()
        return await relay.relay(request, reply, response, partial(_lost, request), hider)
    finally:
        reply.close()


async def _translated(
    request: web.Request, reply: ClientResponse, translation: Translation
) -> web.StreamResponse:
    if reply.content_type == relay.EVENT_STREAM:
        response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: NDJSON})
        return await relay.relay(request, reply, response, partial(_lost, request), translation)
    return await whole_reply(request, await body_of(reply))


def _lost(request: web.Request) -> TowerdError:
    engine = llama_server_of(request)
    error = engine.availability.failure(LOST)
    engine.availability.notice(error)
    return error


async def _copy_failure(request: web.Request, reply: ClientResponse) -> web.StreamResponse:
    """Raises Unavailable if llama-server ended before the reply did."""
    try:
        body = await body_of(reply)
    except Unavailable as lost:
        llama_server_of(request).availability.notice(lost)
        raise
    said = error_body(body) or {"error": {}}
    error = said["error"]
    kind, message = str(error.get("type") or ""), str(error.get("message") or "")
    headers = to_client(reply.headers)
    headers.popall(hdrs.CONTENT_LENGTH, None)
    status, reason = reply.status, reply.reason
    is_final = kind == NotSupported.kind or any(part in message for part in _FINAL)
    if status >= 500 and is_final:  # the same request will meet it again
        status, reason, kind = NotSupported.status, None, NotSupported.kind
        body = encode(said | {"error": error | {"code": status, "type": kind}})
    log_refused(request, status, kind, message)
    shaped = reshaped(request.path, body)
    return web.Response(body=shaped, status=status, reason=reason, headers=headers)


async def body_of(reply: ClientResponse) -> bytes:
    """The whole body of a reply. Raises Unavailable if llama-server ended before the reply did."""
    try:
        return await read_all(reply)
    except Lost as error:
        raise Unavailable(LOST) from error
