"""Ollama's API in front of several models: its names, and loading and unloading by a request's `keep_alive`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from towerd.api.http.access import require_overview
from towerd.api.http.body import read_bytes
from towerd.api.http.keep_alive import STAYS
from towerd.api.http.keys import TENANT
from towerd.api.http.reply import json_reply
from towerd.api.ollama.asked import OllamaAsked, asked_of, without_latest
from towerd.api.ollama.description import DescribedModel, of_file
from towerd.api.ollama.generation import loaded_reply
from towerd.api.ollama.models import FOR_EVER_S
from towerd.api.ollama.pull import pulling
from towerd.api.ollama.replies import Said, chat_said, generate_said
from towerd.router.http.choice import choose
from towerd.router.http.forward import LAUNCHER, MODELS, pass_on
from towerd.router.loading.model import RoutedModel, State

_SAID: dict[str, Said] = {"/api/chat": chat_said, "/api/generate": generate_said}
"""How each route that generates says something."""


async def forward(request: web.Request) -> web.StreamResponse:
    """Pass on a request, whose model stays loaded behind it for as long as it says. One that only unloads a model
    loads none."""
    body = await read_bytes(request)
    asked = await asked_of(request, body)
    model = named(request, asked)
    stays_s = asked.keep_alive_s()
    said = _SAID.get(request.path)
    if said is not None:
        asked.is_streamed()  # a request that only unloads is checked as well
        if stays_s == 0 and asked.is_empty(is_chat=said is chat_said):
            require_overview(request)
            request.app[MODELS].keep_alive(model, 0.0)
            return loaded_reply(asked.model_name(), said, "unload")
    if request[TENANT].sees_all:
        request[STAYS] = stays_s
    # Lines of JSON have no comments that could keep a client patient: it waits, as Ollama's do.
    return await pass_on(request, model, body)


def named(request: web.Request, asked: OllamaAsked) -> RoutedModel:
    """The model of a request, whose name may have the tag `latest` that ours lack. Raises InvalidRequest
    without a name, and NotFound."""
    models, name = request.app[MODELS], asked.model_name()
    return models.find(name) or choose(models, without_latest(name))


async def get_tags(request: web.Request) -> web.Response:
    """All models."""
    models = list(request.app[MODELS].by_name.values())
    listed = await asyncio.to_thread(lambda: [_described(each).listed() for each in models])
    return json_reply({"models": listed})


async def get_ps(request: web.Request) -> web.Response:
    """Those that are loaded."""
    models = request.app[MODELS].loaded()
    running = await asyncio.to_thread(
        lambda: [_described(each).running(_expires_s(each)) for each in models]
    )
    return json_reply({"models": running})


async def post_show(request: web.Request) -> web.Response:
    """What the header of a model's file says: it need not be loaded."""
    model = named(request, await asked_of(request, await read_bytes(request)))
    return json_reply(await asyncio.to_thread(lambda: _described(model).shown()))


def _is_found(request: web.Request, name: str) -> bool:
    return request.app[MODELS].find(name) is not None


async def _look_again(request: web.Request, path: Path) -> bool:
    """Serve what is in the models directory now."""
    found = await asyncio.to_thread(request.app[LAUNCHER].models)
    await request.app[MODELS].replace(found)
    paths = [each.entry.path for each in found.values() if each.entry.path is not None]
    return await asyncio.to_thread(lambda: path.resolve() in {each.resolve() for each in paths})


post_pull = pulling(_is_found, _look_again)


def _described(model: RoutedModel) -> DescribedModel:
    entry, n_ctx, gpu_bytes = model.entry, 0, None
    if model.state is State.LOADED:
        meta: dict[str, Any] = model.info.get("meta") or {}
        n_ctx = int(meta.get("n_ctx") or 0)
        gpu_bytes = (meta.get("towerd") or {}).get("gpu_bytes")
    has_pictures = entry.projector is not None
    found = of_file(entry.name, entry.path, n_ctx=n_ctx, has_pictures=has_pictures)
    return replace(found, size_bytes=entry.file_bytes(), gpu_bytes=gpu_bytes)


def _expires_s(model: RoutedModel) -> float:
    """When a model will be unloaded if no request comes, Unix time."""
    rest_s = model.last_used_s + model.idle_s - time.monotonic()
    return time.time() + min(max(0.0, rest_s), FOR_EVER_S)
