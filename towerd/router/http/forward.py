"""Passes a request on to the process of its model, and the reply back as it arrives."""

from __future__ import annotations

import asyncio

from aiohttp import web

from towerd.api.http.body import read_bytes, release_body
from towerd.api.http.keys import TENANT
from towerd.api.http.reply import error_event, event_of_reply
from towerd.api.http.sse import PING, EventStream
from towerd.api.llama.streams import CONVERSATION
from towerd.api.relay.headers import from_towerd
from towerd.api.relay.relay import relay
from towerd.engine.llama_server.process.client import Lost, read_all
from towerd.errors import InvalidRequest, TowerdError
from towerd.router.http.choice import asked_of, choose, choose_for_store
from towerd.router.http.conversations import Conversations
from towerd.router.http.request import READING, RoutedRequest
from towerd.router.loading.launcher import Launcher
from towerd.router.loading.model import RoutedModel, State
from towerd.router.loading.models import Models
from towerd.settings.model_tables import ModelTables

LAUNCHER = web.AppKey("launcher", Launcher)
MODELS = web.AppKey("models", Models)
TABLES = web.AppKey("tables", ModelTables)
CONVERSATIONS = web.AppKey("conversations", Conversations)
PATIENCE_S = 10.0
"""A client that reads events gets comments if its model takes longer to load."""
PING_S = 2.0
"""And then this often."""
LOADING = b": the model is loading\n\n"
"""What they say while it waits for room."""


async def forward(request: web.Request) -> web.StreamResponse:
    """Pass on a request that names its model in its body, or in its query."""
    body = await read_bytes(request)
    asked = await asked_of(request, body)
    model = choose(request.app[MODELS], asked.model or request.query.get("model"))
    return await pass_on(request, model, body, is_stream=asked.stream is True)


async def forward_named(request: web.Request) -> web.StreamResponse:
    """Pass on a GET, whose query names the model."""
    return await pass_on(request, choose(request.app[MODELS], request.query.get("model")))


async def forward_store(request: web.Request) -> web.StreamResponse:
    """Pass on a request about what is stored: any model's process knows it."""
    name, reads = request.query.get("model"), request.method in READING
    model = choose_for_store(request.app[MODELS], name, reads=reads)
    return await pass_on(request, model, b"" if reads else await read_bytes(request))


async def pass_on(
    request: web.Request,
    model: RoutedModel,
    body: bytes = b"",
    *,
    is_stream: bool = False,
    is_use: bool = True,
) -> web.StreamResponse:
    """Pass a request on to a model, which is loaded first if it is a use of it and need be."""
    may_load = check_autoload(request, model) and is_use
    routed = RoutedRequest(
        request.app[MODELS], model, request, body, is_use=is_use, may_load=may_load
    )
    opening = asyncio.create_task(routed.open())
    conversation = request.headers.get(CONVERSATION) if is_stream else None
    if conversation:
        key = (request[TENANT].scope, conversation)
        request.app[CONVERSATIONS].add(key, routed, opening)
    try:
        early = await _wait(request, model, opening, is_stream=is_stream)
        release_body(request)  # those that still wait for their model count
        response = await _answer(request, routed, opening, early)
    except BaseException:
        if conversation and not routed.is_stopped:
            request.app[CONVERSATIONS].finish(routed, opening)
        elif not opening.cancel():
            routed.close()
        raise
    routed.close()
    return response


def check_autoload(request: web.Request, model: RoutedModel) -> bool:
    """Whether the request may load its model: what only reads does it if its query says so. Raises
    InvalidRequest if it may not, and the model is not loaded."""
    said = request.query.get("autoload", "")
    usual = request.app[TABLES].config.models_autoload and request.method not in READING
    may = usual if not said else said in ("true", "1")
    if not may and model.state is not State.LOADED and not model.is_on_its_way:
        raise InvalidRequest("model is not loaded")
    return may


async def _wait(
    request: web.Request, model: RoutedModel, opening: asyncio.Task[None], *, is_stream: bool
) -> EventStream | None:
    """Wait for the head of the reply. If that takes long, a stream begins before it, and comments
    keep the client from giving up; returns that stream."""
    early: EventStream | None = None
    pause_s = PATIENCE_S if is_stream else None
    while not (await asyncio.wait((opening,), timeout=pause_s))[0]:
        if early is None:
            early, pause_s = EventStream(request), PING_S
            await early.open({})
        await early.write(_progress(model))
    return early


def _progress(model: RoutedModel) -> bytes:
    """A comment in a stream of events, which clients skip and people can read."""
    if model.state is State.LOADING:
        return f": the model is loading, {model.loaded_share:.0%}\n\n".encode()
    return LOADING if not model.is_running else PING


async def _answer(
    request: web.Request,
    routed: RoutedRequest,
    opening: asyncio.Task[None],
    early: EventStream | None,
) -> web.StreamResponse:
    """Pass the reply on. Raises TowerdError if there is none and the stream has not begun."""
    try:
        if routed.is_stopped:
            raise InvalidRequest("request cancelled by a stop while the model was loading")
        opening.result()
    except TowerdError as error:
        if early is None:
            raise
        await early.write(error_event(request.path, error))
        await early.close()
        return early.response
    reply = routed.reply
    assert reply is not None
    if early is None:
        response = web.StreamResponse(
            status=reply.status, reason=reply.reason, headers=from_towerd(reply.headers)
        )
        return await relay(request, reply, response, routed.lost)
    if reply.status == 200:
        return await relay(request, reply, early.response, routed.lost)
    try:
        await early.write(event_of_reply(request.path, await read_all(reply)))
    except Lost:
        await early.write(error_event(request.path, routed.lost()))
    await early.close()
    return early.response
