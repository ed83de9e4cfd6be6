"""POST /towerd/v1/precache: evaluate a base prompt, store it and pin it under a name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from towerd.api.admin.pins import base_json
from towerd.api.http import fields
from towerd.api.http.access import own_scope, require_admin
from towerd.api.http.body import read_object
from towerd.api.http.fields import Body
from towerd.api.http.gate import ApiService
from towerd.api.http.keys import service_of
from towerd.api.http.reply import json_reply
from towerd.api.http.sse import event_stream
from towerd.api.llama.reuse import progress_json, reuse_json, timings_json
from towerd.engine.base import Engine, Event, Finish, GenerateRequest, Progress, encode
from towerd.errors import (
    ConfigError,
    ContextExceeded,
    InvalidRequest,
    NotSupported,
    Unavailable,
)
from towerd.store.sessions.turn import ANYWHERE, PREFIX
from towerd.store.tree.scope import public_of
from towerd.tiers.formats.fidelity import check_format
from towerd.tokens import Ids

if TYPE_CHECKING:  # llama.cpp is loaded with the model, after the address is listened on
    from towerd.wire import Model

LEVEL_MAX = 64
REUSE_TOKENS_MIN = 64
"""A shorter text is not looked for in the middle of prompts."""


@dataclass(frozen=True, slots=True)
class BaseSpec:
    """A base to precache: its whole prompt, from the first token on."""

    name: str
    ids: Ids
    scope: str
    level: int
    public: bool
    format: str | None = None
    """The format to store it in, overriding that of its level."""
    anywhere: bool = False
    """Whether it is a text that may stand anywhere in prompts, by itself."""

    def request(self) -> GenerateRequest:
        """The request that evaluates the base and generates nothing."""
        return GenerateRequest(
            ids=self.ids,
            n_predict=0,
            scope=public_of(self.scope) if self.public else self.scope,
            return_progress=True,
            precache=self.name,
        )


async def post_precache(request: web.Request) -> web.StreamResponse:
    """Takes `name`, and `prompt` (as in /completion) or `messages`; optional are `level`,
    `public`, `format`, `reuse` and `stream`.
    Repeating it with the same prompt costs nothing."""
    require_admin(request)
    service = service_of(request)
    body = await read_object(request)
    spec = await _parse(body, request.content_length or 0, service.engine, own_scope(request))
    sessions = service.sessions
    if fields.boolean(body, "stream", False):
        async with aclosing(sessions.run(spec.request())) as events:
            return await _stream(request, spec, events, service)
    return json_reply(await _enter(service, spec, await sessions.run_quietly(spec.request())))


async def _parse(body: Body, n_bytes: int, engine: Engine, scope: str) -> BaseSpec:
    name = fields.string(body, "name", "")
    if not name or not name.isprintable():
        raise InvalidRequest("Field 'name' is required: printable text")
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise InvalidRequest("Exactly one of 'prompt' and 'messages' is required")
    anywhere = _anywhere(body, engine)
    ids = await engine.wire.call(n_bytes, _prompt_of, engine.wire.model, body)
    if anywhere and len(ids) < REUSE_TOKENS_MIN:
        raise InvalidRequest(
            f"A text that is reused anywhere needs {REUSE_TOKENS_MIN} tokens; this one has {len(ids)}"
        )
    if len(ids) >= engine.n_ctx:
        raise ContextExceeded.of_request(len(ids), engine.n_ctx)
    return BaseSpec(
        name=name,
        ids=ids,
        scope=scope,
        level=fields.integer_in(body, ("level",), 0, 0, LEVEL_MAX),
        public=fields.boolean(body, "public", False),
        format=_format(body),
        anywhere=anywhere,
    )


def _prompt_of(model: Model, body: Body) -> Ids:
    """The prompt of an ordinary base, tokenized as a request's will be."""
    from towerd.wire import Request

    is_chat = body.get("messages") is not None
    asked = {"add_generation_prompt": False, **body} if is_chat else {"prompt": body["prompt"]}
    data = encode({**asked, "stream": False})
    request = Request(model, "chat" if is_chat else "completion", data)
    if request.media(0):
        raise NotSupported(
            "Only text can be precached: pictures and sounds stay with the chats that show them"
        )
    if len(request.prompts) != 1 or not len(request.prompts[0]):
        raise InvalidRequest('"prompt" must be one non-empty prompt')
    return request.prompts[0]


def _anywhere(body: Body, engine: Engine) -> bool:
    """Whether `reuse: anywhere` is asked for. Raises InvalidRequest, NotSupported."""
    reuse = fields.string(body, "reuse", PREFIX)
    if reuse not in (PREFIX, ANYWHERE):
        raise InvalidRequest(f"Field 'reuse' must be '{PREFIX}' or '{ANYWHERE}', not {reuse!r}")
    if reuse == PREFIX:
        return False
    if engine.why_not_movable:
        raise NotSupported(f"Rows cannot be kept after other text here: {engine.why_not_movable}")
    if body.get("messages") is not None:
        raise InvalidRequest("'reuse': 'anywhere' takes a 'prompt', not 'messages'")
    return True


def _format(body: Body) -> str | None:
    """The requested stored format. Raises InvalidRequest."""
    name = fields.string(body, "format", "")
    if not name:
        return None
    try:
        check_format(name, "Field 'format'")
    except ConfigError as error:
        raise InvalidRequest(error.message) from error
    return name


async def _enter(service: ApiService, spec: BaseSpec, finish: Finish | None) -> dict[str, Any]:
    """Pin the evaluated path under its name."""
    if finish is None or finish.stop == "cancelled":
        raise Unavailable("The base was not evaluated to its end")
    base = await asyncio.to_thread(
        service.store.bases.add,
        spec.name,
        spec.ids,
        spec.scope,
        spec.level,
        spec.public,
        spec.format,
        spec.anywhere,
    )
    return {
        "base": base_json(base),
        "reuse": reuse_json(finish.reuse),
        "timings": timings_json(finish.timings),
    }


async def _stream(
    request: web.Request, spec: BaseSpec, events: AsyncIterator[Event], service: ApiService
) -> web.StreamResponse:
    """Stream progress events, and the entered base at the end."""
    event: Event | None = await anext(events)  # a failure before it is an ordinary error reply
    finish: Finish | None = None
    async with event_stream(request) as stream:
        while event is not None:
            if isinstance(event, Progress):
                await stream.send([{"progress": progress_json(event)}])
            elif isinstance(event, Finish):
                finish = event
            event = await anext(events, None)
        await stream.send([await _enter(service, spec, finish)])
    return stream.response
