"""GET /api/tags, /api/ps and /api/version, POST /api/show: what a daemon of one model says of it. None of them wakes
one that sleeps. And what there is no place for here: making, copying, deleting and publishing models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from towerd import __version__
from towerd.api.http.body import read_bytes
from towerd.api.http.keys import CONFIG, GATE
from towerd.api.http.reply import json_reply
from towerd.api.ollama.asked import asked_of
from towerd.api.ollama.description import DescribedModel, of_info
from towerd.api.ollama.pull import post_pull
from towerd.engine.base import Engine
from towerd.errors import NotFound, NotSupported

Json: TypeAlias = dict[str, Any]

API_VERSION = "0.13.0"
"""The Ollama whose API this is: programs compare it with the oldest that they work with."""
FOR_EVER_S = 100 * 365 * 86400.0
"""Ollama's programs say of a model that stays longer than anyone that it stays for ever."""
UNSERVED: tuple[tuple[str, str], ...] = (
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
    ("POST", "/api/push"),
    ("POST", "/api/blobs/{digest}"),
    ("HEAD", "/api/blobs/{digest}"),
)
"""(method, path) of what is refused."""


async def get_version(request: web.Request) -> web.Response:
    """The version of Ollama's API, and towerd's own."""
    return json_reply({"version": API_VERSION, "towerd": __version__})


async def get_tags(request: web.Request) -> web.Response:
    """The one model that there is."""
    return json_reply({"models": [await _said(request, DescribedModel.listed)]})


async def get_ps(request: web.Request) -> web.Response:
    """The same, unless it sleeps."""
    gate = request.app[GATE]
    if gate.asleep is not None:
        return json_reply({"models": []})
    idle_s, own_s = gate.keep_alive_s, request.app[CONFIG].sleep_idle_seconds
    if idle_s is None:
        idle_s = own_s if own_s > 0 else FOR_EVER_S
    rest_s = min(max(0.0, idle_s - gate.idle_s()), FOR_EVER_S)
    running = partial(DescribedModel.running, expires_s=time.time() + rest_s)
    return json_reply({"models": [await _said(request, running)]})


async def post_show(request: web.Request) -> web.Response:
    """Its metadata, template and capabilities, whatever name it is asked for by."""
    asked = await asked_of(request, await read_bytes(request))
    asked.model_name()
    return json_reply(await _said(request, DescribedModel.shown))


async def refuse(request: web.Request) -> web.StreamResponse:
    """Always raises NotSupported, or NotFound for a blob that is asked for: there are none."""
    if request.method == "HEAD":
        raise NotFound("There are no blobs: models are GGUF files")
    raise NotSupported(
        f"{request.method} {request.path} is not supported: models are GGUF files, which are put in place, "
        "copied and deleted as files. `towerd models get` fetches one, as POST /api/pull does"
    )


async def _said(request: web.Request, what: Callable[[DescribedModel], Json]) -> Json:
    """What is said of the model. Reads files."""
    gate = request.app[GATE]
    if (asleep := gate.asleep) is not None:
        template = str(asleep.props.get("chat_template", ""))
        describe = partial(of_info, asleep.info, asleep.n_ctx, template)
    else:
        describe = partial(_of_engine, gate.open().engine)
    return await asyncio.to_thread(lambda: what(describe()))


def _of_engine(engine: Engine) -> DescribedModel:
    template = msgspec.json.decode(engine.wire.model.props())["chat_template"]
    return of_info(engine.info, engine.n_ctx, template)


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/api/version", get_version),
    ("GET", "/api/tags", get_tags),
    ("GET", "/api/ps", get_ps),
    ("POST", "/api/show", post_show),
    ("POST", "/api/pull", post_pull),
    *((*route, refuse) for route in UNSERVED),
)
"""(method, path, handler) of those that are the same on either engine."""
