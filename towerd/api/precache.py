"""POST /towerd/v1/precache: evaluate a base prompt, store it and pin it under a name."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from towerd.api import fields
from towerd.api.body import read_object
from towerd.api.chat import render_chat
from towerd.api.fanout import Events, fan_out
from towerd.api.fields import Body
from towerd.api.keys import LIMITS, TENANT, Service, service_of
from towerd.api.own_segments import PUBLIC
from towerd.api.pins import base_json, require_admin
from towerd.api.prompts import tokenize_prompts
from towerd.api.reply import json_reply
from towerd.api.shapes import progress_json, reuse_json, timings_json
from towerd.api.sse import EventStream
from towerd.engine.base import Engine, Finish, GenerateRequest, Ids, Progress
from towerd.errors import ContextExceeded, InvalidRequest, TowerdError, Unavailable

LEVEL_MAX = 64


@dataclass(frozen=True, slots=True)
class BaseSpec:
    """A base to precache: its whole prompt, from the first token on."""

    name: str
    ids: Ids
    scope: str
    level: int
    public: bool

    def request(self) -> GenerateRequest:
        """The request that evaluates it and generates nothing."""
        return GenerateRequest(
            ids=self.ids,
            n_predict=0,
            scope=PUBLIC if self.public else self.scope,
            return_progress=True,
            precache=self.name,
        )


async def post_precache(request: web.Request) -> web.StreamResponse:
    """`name`, and `prompt` (as in /completion) or `messages`; `level`, `public`, `stream`.
    Doing it again with the same prompt costs nothing."""
    require_admin(request)
    service = service_of(request)
    body = await read_object(request)
    spec = await _parse(body, service.engine, request[TENANT].scope)
    events_max = request.app[LIMITS].events_max
    async with fan_out(
        service.sessions, [spec.request()], parallel=1, events_max=events_max
    ) as events:
        if fields.boolean(body, "stream", False):
            return await _stream(request, spec, events, service)
        finish = None
        while (item := await events.next()) is not None:
            if isinstance(item[1], Finish):
                finish = item[1]
    return json_reply(await _enter(service, spec, finish))


async def _parse(body: Body, engine: Engine, scope: str) -> BaseSpec:
    name = fields.string(body, "name", "")
    if not name or not name.isprintable():
        raise InvalidRequest("Field 'name' is required: printable text")
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise InvalidRequest("Exactly one of 'prompt' and 'messages' is required")
    if body.get("messages") is not None:
        prompt: Any = await render_chat({"add_generation_prompt": False, **body}, engine)
    else:
        prompt = body["prompt"]
    prompts = await tokenize_prompts(prompt, engine, 1)
    ids = prompts[0]
    if len(ids) >= engine.n_ctx:
        raise ContextExceeded(
            f"the base ({len(ids)} tokens) exceeds the available context size "
            f"({engine.n_ctx} tokens)",
            n_prompt_tokens=len(ids),
            n_ctx=engine.n_ctx,
        )
    return BaseSpec(
        name=name,
        ids=ids,
        scope=scope,
        level=fields.integer_in(body, ("level",), 0, 0, LEVEL_MAX),
        public=fields.boolean(body, "public", False),
    )


async def _enter(service: Service, spec: BaseSpec, finish: Finish | None) -> dict[str, Any]:
    """Pin the evaluated path under its name."""
    if finish is None or finish.stop == "cancelled":
        raise Unavailable("The base was not evaluated to its end")
    base = await asyncio.to_thread(
        service.store.add_base, spec.name, spec.ids, spec.scope, spec.level, spec.public
    )
    return {
        "base": base_json(base),
        "reuse": reuse_json(finish.reuse),
        "timings": timings_json(finish.timings),
    }


async def _stream(
    request: web.Request, spec: BaseSpec, events: Events, service: Service
) -> web.StreamResponse:
    """Progress as it comes, the entered base last."""
    item = await events.next()
    stream = EventStream(request, {})
    await stream.prepare()
    finish = None
    try:
        while item is not None:
            event = item[1]
            if isinstance(event, Progress):
                await stream.send([{"progress": progress_json(event)}])
            elif isinstance(event, Finish):
                finish = event
            item = await events.next()
        await stream.send([await _enter(service, spec, finish)])
    except TowerdError as error:
        await stream.send([error.body()])
    await stream.close()
    return stream.response
