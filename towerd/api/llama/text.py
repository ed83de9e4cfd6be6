"""POST /tokenize, /detokenize, /apply-template and the token counters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec
import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler

from towerd.api.http import fields
from towerd.api.http.access import own_scope
from towerd.api.http.body import read_bytes, read_object
from towerd.api.http.hints import hints_of
from towerd.api.http.keys import service_of
from towerd.api.http.off_loop import by_size, size_of
from towerd.api.http.reply import encode, json_reply, raw_reply
from towerd.api.responses.pending_response import PendingResponse
from towerd.engine.base import Engine
from towerd.errors import InvalidRequest
from towerd.tokens import Ids

if TYPE_CHECKING:
    from towerd.wire import Endpoint


Parts: TypeAlias = list["str | Ids"]
"""Texts to tokenize and ids as given, in order."""

TEXTS_MAX = 16_384
"""Texts in one prompt, each of which is tokenized separately."""
_FORMS = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt '
    "string, or a list of mixed strings & tokens."
)


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


async def tokenize_mixed(
    content: Any, engine: Engine, *, add_special: bool, parse_special: bool
) -> Ids:
    """Convert text, ids or a list of both to ids; only text at the very front gets the BOS token.

    Raises InvalidRequest."""
    if not isinstance(content, str | list):
        raise fields.wrong_type("content", "string or array", content)
    out: list[Ids] = []
    parts = await by_size(size_of(content), _parts, content, engine.info.n_vocab)
    for index, part in enumerate(parts):
        if isinstance(part, str):
            first = add_special and index == 0
            out.append(await engine.tokenize(part, add_special=first, parse_special=parse_special))
        else:
            out.append(part)
    if len(out) == 1:
        return out[0]
    return cast(Ids, np.concatenate(out)) if out else np.zeros(0, np.int32)


def _parts(content: str | list[Any], n_vocab: int) -> Parts:
    if isinstance(content, str):
        return [content]
    if sum(isinstance(item, str) for item in content) > TEXTS_MAX:
        raise InvalidRequest(f'"prompt" may hold at most {TEXTS_MAX} texts among its tokens')
    parts: Parts = []
    run: list[int] = []
    for item in content:
        if type(item) is int:
            run.append(item)
            continue
        if not isinstance(item, str):
            raise InvalidRequest(_FORMS)
        if run:
            parts.append(_checked_ids(run, n_vocab))
            run = []
        parts.append(item)
    if run:
        parts.append(_checked_ids(run, n_vocab))
    return parts


def _checked_ids(values: list[int], n_vocab: int) -> Ids:
    try:
        ids = np.asarray(values, dtype=np.int64)
    except OverflowError:
        raise InvalidRequest("Prompt contains invalid tokens") from None
    if ids.min() < 0 or ids.max() >= n_vocab:
        raise InvalidRequest("Prompt contains invalid tokens")
    return ids.astype(np.int32)


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


def counting(endpoint: Endpoint) -> Handler:
    """The handler that counts the prompt tokens of requests to an endpoint."""

    async def handle(request: web.Request) -> web.StreamResponse:
        _announce(request)
        wire = service_of(request).engine.wire
        body = await read_bytes(request)
        if endpoint == "responses":
            _, body = await PendingResponse.of(request, body)
        return raw_reply(await wire.call(len(body), wire.model.count_tokens, endpoint, body))

    return handle


post_chat_tokens = counting("chat")
post_responses_tokens = counting("responses")
post_messages_tokens = counting("messages")


def _announce(request: web.Request) -> None:
    """Announce the session to the cold tier: a client that prepares a prompt will send it soon."""
    service_of(request).cold.named(hints_of(request).session, own_scope(request))
