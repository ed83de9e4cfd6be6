"""/v1/stream: streams that outlive their clients, each in the process of its model."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from towerd.api.http.body import decode, read_bytes
from towerd.api.http.keys import TENANT
from towerd.api.http.reply import json_reply
from towerd.api.llama.streams import key_of
from towerd.errors import InvalidRequest, NotFound, Unavailable
from towerd.router.http.conversations import Key
from towerd.router.http.forward import CONVERSATIONS, pass_on
from towerd.router.http.loaded import ask_loaded
from towerd.router.loading.model import State


async def get_stream(request: web.Request) -> web.StreamResponse:
    """Replay a stream, and follow it."""
    key = _key(request)
    conversations = request.app[CONVERSATIONS]
    if conversations.is_waiting(key):
        raise Unavailable("Stream owner model is loading, retry later")
    model = conversations.model_of(key)
    if model is None or model.state is not State.LOADED:
        raise NotFound("Stream not found or expired")
    return await pass_on(request, model)


async def delete_stream(request: web.Request) -> web.StreamResponse:
    """End a stream, or the wait for its model. Answers 204 even if there is none."""
    key = _key(request)
    model = request.app[CONVERSATIONS].model_of(key)
    request.app[CONVERSATIONS].stop(key)
    if model is not None and model.state is State.LOADED:
        return await pass_on(request, model, is_use=False)
    return web.Response(status=204)


async def post_lookup(request: web.Request) -> web.StreamResponse:
    """Which of `conversation_ids` have a stream, in any model."""
    body = await read_bytes(request)
    await decode(request, body)
    models = request.app[CONVERSATIONS].models_of(request[TENANT].scope)
    answers = await ask_loaded(request, list(models), body)
    return json_reply([each for answer in answers for each in _listed(answer)])


def _listed(answer: web.Response) -> list[Any]:
    """What one model listed; nothing if it did not."""
    assert isinstance(answer.body, bytes)
    try:
        said = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return []
    return said if isinstance(said, list) else []


def _key(request: web.Request) -> Key:
    name = request.query.get("conv_id")
    if not name:
        raise InvalidRequest("Missing conversation id in path")
    return key_of(request, name)
