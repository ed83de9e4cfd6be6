"""Bodies as llama-server takes them: what `towerd.wire` repairs in a request that it parses itself is
repaired here in one that is forwarded. See `towerd.wire.mended_body`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from towerd.api.http.body import read_bytes
from towerd.api.http.json_text import may_be_mended
from towerd.api.http.keys import LIMITS
from towerd.api.proxy.watch import Dialect
from towerd.engine.llama_server.engine import LlamaServerEngine

if TYPE_CHECKING:  # llama.cpp's libraries are loaded with the first chat
    from towerd.wire import Endpoint

_CHATS: dict[str, Endpoint] = {
    "/apply-template": "chat",
    "/chat/completions/input_tokens": "chat",
    "/v1/chat/completions/input_tokens": "chat",
    "/responses/input_tokens": "responses",
    "/v1/responses/input_tokens": "responses",
    "/v1/messages/count_tokens": "messages",
}
_TEXTS = frozenset(
    (
        "/tokenize",
        "/detokenize",
        "/rerank",
        "/reranking",
        "/v1/rerank",
        "/v1/reranking",
    )
)
_DIALECTS: dict[Dialect, Endpoint] = {
    Dialect.CHAT: "chat",
    Dialect.RESPONSES: "responses",
    Dialect.MESSAGES: "messages",
}


async def mended_text_of(
    request: web.Request, engine: LlamaServerEngine, bytes_max: int
) -> bytes | None:
    """The body of a request about texts that is forwarded as it is otherwise; None if it is to pass as
    it arrives. bytes_max: as for `iter_bytes`. Raises the errors of reading it."""
    if request.method != "POST" or request.path not in _TEXTS:
        return None
    return await mended_text(request, await read_bytes(request, bytes_max), engine)


async def mended_text(request: web.Request, data: bytes, engine: LlamaServerEngine) -> bytes:
    """The body of a request about texts that are no chat."""
    return await _mended(request, None, data, engine)


async def mended_chat(request: web.Request, data: bytes, engine: LlamaServerEngine) -> bytes:
    """The body of a chat that is only counted or rendered."""
    return await _mended(request, _CHATS[request.path], data, engine)


async def mended(
    request: web.Request, dialect: Dialect, data: bytes, engine: LlamaServerEngine
) -> bytes:
    """The body of a request that generates."""
    return await _mended(request, _DIALECTS.get(dialect), data, engine)


async def _mended(
    request: web.Request, endpoint: Endpoint | None, data: bytes, engine: LlamaServerEngine
) -> bytes:
    if len(data) <= request.app[LIMITS].inline_bytes_max:
        return _mend(endpoint, data, engine.takes_argument_text)
    return await asyncio.to_thread(_mend, endpoint, data, engine.takes_argument_text)


def _mend(endpoint: Endpoint | None, data: bytes, takes_text: bool) -> bytes:
    if endpoint is None and not may_be_mended(data):
        return data
    from towerd.wire import mended_body, mended_json

    return mended_json(data) if endpoint is None else mended_body(endpoint, data, takes_text)
