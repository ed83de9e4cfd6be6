"""POST /tokenize, /detokenize, /apply-template and the token counters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from towerd.api.http import fields
from towerd.api.http.body import read_bytes, read_object
from towerd.api.http.hints import hints_of
from towerd.api.http.keys import service_of
from towerd.api.http.off_loop import by_size
from towerd.api.http.reply import encode, json_reply, raw_reply
from towerd.api.http.scope import own_scope
from towerd.api.llama.prompts import tokenize_mixed
from towerd.engine.base import Engine
from towerd.tokens import Ids

if TYPE_CHECKING:
    from towerd.wire import Endpoint


async def post_tokenize(request: web.Request) -> web.Response:
    """Convert text, or a mix of texts and ids, to ids."""
    _announce(request)
    engine = service_of(request).engine
    body = await read_object(request)
    if body.get("content") is None:
        return json_reply({"tokens": []})
    ids = await tokenize_mixed(
        body["content"],
        engine,
        add_special=fields.boolean(body, "add_special", False),
        parse_special=fields.boolean(body, "parse_special", True),
    )
    with_pieces = fields.boolean(body, "with_pieces", False)
    return await by_size(len(ids), _tokens_reply, ids, engine if with_pieces else None)


def _tokens_reply(ids: Ids, engine: Engine | None) -> web.Response:
    """The reply for `ids`, with their pieces if `engine` is given. Encoded in slices, so that no
    single step holds the GIL for long."""
    slices: list[bytes] = []
    for start in range(0, len(ids), _SLICE):
        tokens: list[Any] = ids[start : start + _SLICE].tolist()
        if engine is not None:
            pieces = engine.pieces(tokens)
            tokens = [{"id": i, "piece": _piece(p)} for i, p in zip(tokens, pieces, strict=True)]
        slices.append(encode(tokens)[1:-1])
    return json_reply({"tokens": msgspec.Raw(b"[" + b",".join(slices) + b"]")})


_SLICE = 4096


def _piece(piece: bytes) -> str | list[int]:
    """A token's text if its bytes are valid UTF-8, else the bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def post_detokenize(request: web.Request) -> web.Response:
    """Convert ids to text."""
    wire = service_of(request).engine.wire
    body = bytes(await read_bytes(request)) or b"{}"
    return raw_reply(await wire.call(len(body), wire.model.detokenize, body))


async def post_apply_template(request: web.Request) -> web.Response:
    """Convert a chat request to the prompt text that it would be evaluated as."""
    _announce(request)
    wire = service_of(request).engine.wire
    body = await read_bytes(request)
    return raw_reply(await wire.call(len(body), wire.model.apply_template, body))


async def post_chat_tokens(request: web.Request) -> web.Response:
    """Count the prompt tokens of a chat completion."""
    return await _count(request, "chat")


async def post_responses_tokens(request: web.Request) -> web.Response:
    """Count the prompt tokens of a Responses request."""
    return await _count(request, "responses")


async def post_messages_tokens(request: web.Request) -> web.Response:
    """Count the prompt tokens of a Messages request."""
    return await _count(request, "messages")


async def _count(request: web.Request, endpoint: Endpoint) -> web.Response:
    _announce(request)
    wire = service_of(request).engine.wire
    body = await read_bytes(request)
    return raw_reply(await wire.call(len(body), wire.model.count_tokens, endpoint, body))


def _announce(request: web.Request) -> None:
    """Announce the session to the cold tier: a client that prepares a prompt will send it soon."""
    service_of(request).cold.named(hints_of(request).session, own_scope(request))
