"""What the router answers itself, in the shapes of llama-server's router."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from aiohttp import web

from towerd.api.http.access import require_overview
from towerd.api.http.body import read_object
from towerd.api.http.keys import REQUESTS, UI_SETTINGS
from towerd.api.http.reply import json_reply
from towerd.api.http.sse import EventStream
from towerd.api.llama.info import BUILD_INFO
from towerd.errors import InvalidRequest, NotFound, NotSupported, SwitchedOff
from towerd.router.http.forward import LAUNCHER, MODELS, TABLES, forward_named
from towerd.router.loading.metrics import RouterMetrics
from towerd.router.loading.model import RoutedModel, State

PING_S = 15.0
PING = b":\n\n"


async def get_health(request: web.Request) -> web.Response:
    """The router serves."""
    return json_reply({"status": "ok"})


async def get_props(request: web.Request) -> web.StreamResponse:
    """The router's own; those of the model that the query names."""
    if request.query.get("model"):
        return await forward_named(request)
    config = request.app[TABLES].config
    return json_reply(
        {
            "role": "router",
            "max_instances": config.models_max,
            "models_autoload": config.models_autoload,
            "model_alias": "llama-server",
            "model_path": "none",
            "default_generation_settings": {"params": None, "n_ctx": 0},
            "ui_settings": request.app[UI_SETTINGS],
            "build_info": BUILD_INFO,
            "cors_proxy_enabled": config.ui_mcp_proxy,
        }
    )


async def get_metrics(request: web.Request) -> web.StreamResponse:
    """The router's own; those of the model that the query names."""
    if request.query.get("model"):
        return await forward_named(request)
    if not request.app[TABLES].config.metrics_endpoint:
        raise SwitchedOff(
            "This server does not support metrics endpoint. Start it with `--metrics`"
        )
    require_overview(request)
    metrics = request.app[REQUESTS]
    assert isinstance(metrics, RouterMetrics)
    reply = web.Response(body=metrics.render(request.app[MODELS].by_name.values()))
    reply.headers["Content-Type"] = "text/plain; version=0.0.4"
    reply.headers["Process-Start-Time-Unix"] = str(metrics.started_unix)
    return reply


async def get_models(request: web.Request) -> web.Response:
    """All models, with their status. reload: what is in the directory now."""
    if request.query.get("reload"):
        require_overview(request)
        found = await asyncio.to_thread(request.app[LAUNCHER].models)
        await request.app[MODELS].replace(found)
    models = request.app[MODELS].by_name.values()
    return json_reply({"data": [_model_json(each) for each in models], "object": "list"})


def _model_json(model: RoutedModel) -> dict[str, Any]:
    entry = model.entry
    args = _args(model)
    status: dict[str, Any] = {"value": model.shown_state, "args": args, "preset": _preset(model)}
    if model.state is State.UNLOADED and model.exit_code:
        status |= {"exit_code": model.exit_code, "failed": True}
    inputs = ["text", "image"] if entry.projector is not None else ["text"]
    said: dict[str, Any] = {
        "id": entry.name,
        "aliases": list(entry.aliases),
        "tags": list(entry.tags),
        "object": "model",
        "owned_by": "llamacpp",
        "created": int(time.time()),
        "status": status,
        "architecture": {"input_modalities": inputs, "output_modalities": ["text"]},
        "source": entry.source,
        "can_remove": False,
    }
    return model.info | said if model.is_running else said


def _args(model: RoutedModel) -> list[str]:
    """A command that would serve the model alone; llama-server's router starts such a one."""
    entry = model.entry
    path = () if entry.path is None else ("--model", str(entry.path))
    return ["towerd", "serve", *path, "--alias", entry.name, *entry.server_args]


def _preset(model: RoutedModel) -> str:
    """Its files as a section of llama-server's presets."""
    entry = model.entry
    lines = [f"[{entry.name}]"]
    for key, path in (
        ("model", entry.path),
        ("mmproj", entry.projector),
        ("model-draft", entry.draft),
    ):
        if path is not None:
            lines.append(f"{key} = {path}")
    return "\n".join(lines) + "\n\n"


async def post_load(request: web.Request) -> web.Response:
    """Begin to load a model. Whose requests load models may do so: the chat page asks for it."""
    if not request.app[TABLES].config.models_autoload:
        require_overview(request)
    model = await _named(request)
    if model is None:
        raise NotFound("model is not found")
    if model.is_running:
        raise InvalidRequest("model is already running")
    request.app[MODELS].begin_load(model)
    return json_reply({"success": True})


async def post_unload(request: web.Request) -> web.Response:
    """Begin to unload a model."""
    require_overview(request)
    model = await _named(request)
    if model is None:
        raise InvalidRequest("model is not found")
    if not model.is_running:
        raise InvalidRequest("model is not running")
    request.app[MODELS].begin_unload(model)
    return json_reply({"success": True})


async def _named(request: web.Request) -> RoutedModel | None:
    name = (await read_object(request)).get("model")
    return request.app[MODELS].find(name) if isinstance(name, str) else None


async def get_sse(request: web.Request) -> web.StreamResponse:
    """Every change of a model's status, as it happens."""
    stream = EventStream(request)
    with request.app[MODELS].events.listen() as queue:
        await stream.open({})
        while True:
            try:
                event = await asyncio.wait_for(queue.get(), PING_S)
            except TimeoutError:
                await stream.write(PING)
                continue
            if event is None:
                break
            await stream.send([event])
    await stream.close()
    return stream.response


async def refuse_download(request: web.Request) -> web.StreamResponse:
    """Models are neither fetched nor deleted here. Raises NotSupported."""
    raise NotSupported(
        "The router serves what is in its models directory and in towerd.toml: put files there, and "
        "GET /models?reload=1"
    )


async def get_processes(request: web.Request) -> web.Response:
    """The router, which is the broker of the store's catalog, the processes of models, and the one in
    reserve."""
    require_overview(request)
    models = request.app[MODELS].by_name.values()
    spare = request.app[LAUNCHER].spare_pid
    return json_reply(
        {
            "processes": [
                {"pid": os.getpid(), "role": "router", "is_broker": True},
                *(_process_json(each) for each in models if each.process is not None),
                *([{"pid": spare, "role": "reserve", "is_broker": False}] if spare else []),
            ]
        }
    )


def _process_json(model: RoutedModel) -> dict[str, Any]:
    assert model.process is not None
    return {
        "pid": model.process.pid_if_started,
        "role": "model",
        "is_broker": False,
        "model": model.name,
        "state": model.state.value,
        "silent": model.silent or None,
    }
