"""The router's application and its life: listen, serve, shut down."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

from aiohttp import web

from towerd.api.admin import address, page
from towerd.api.admin.page import built_ui, ui_files
from towerd.api.http.body import BODIES, Bodies
from towerd.api.http.keys import (
    CONFIG,
    LIMITS,
    LISTENING,
    REQUESTS,
    RESPONSES,
    TENANTS,
    UI,
    UI_SETTINGS,
)
from towerd.api.http.limits import Limits
from towerd.api.http.middleware import account, add_headers, authenticate, guard
from towerd.api.http.room import RAM
from towerd.api.http.tenants import Tenants
from towerd.api.llama import mcp_proxy, predict, unsupported
from towerd.api.ollama import models as ollama_models
from towerd.app.listening import listening
from towerd.app.loop import run_on_loop, stop_event, tune_gc, watch_lag
from towerd.app.next_steps import next_steps
from towerd.app.response_routes import RESPONSE_ROUTES
from towerd.app.store_routes import Route, add_routes
from towerd.router.http import ollama, routes, streams
from towerd.router.http.conversations import Conversations
from towerd.router.http.forward import (
    CONVERSATIONS,
    LAUNCHER,
    MODELS,
    TABLES,
    forward,
    forward_named,
    forward_store,
)
from towerd.router.http.loaded import ask_whoever_knows
from towerd.router.loading.launcher import Launcher
from towerd.router.loading.metrics import RouterMetrics
from towerd.router.loading.models import Models
from towerd.settings.llama_flags import ui_settings
from towerd.settings.model_tables import ModelTables
from towerd.store.catalog.shared.broker import CatalogBroker
from towerd.store.sessions.responses import ResponseTable
from towerd.system.folders import socket_folder
from towerd.system.process import name_process
from towerd.system.ram_limit import RamLimit

log = logging.getLogger(__name__)


def run(tables: ModelTables) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError; nothing is left running then."""
    run_on_loop(_serve(tables))


async def _serve(tables: ModelTables) -> None:
    stopping = stop_event()
    name_process("towerd-router")
    broker = await asyncio.to_thread(CatalogBroker, tables.config.store_dir, tables.config.encrypt)
    broker.limit.bytes_max = tables.config.disk_max
    responses = ResponseTable(broker.catalog, lambda: broker.turn, time.time, broker.limit)
    log.info("this process is the router and the catalog's broker", extra={"pid": os.getpid()})
    try:
        with socket_folder("towerd-models-") as folder:
            launcher = Launcher(tables, Path(folder), broker)
            try:
                await _route(launcher, tables, responses, stopping)
            finally:
                await launcher.close()
    finally:
        await asyncio.to_thread(broker.close)


async def _route(
    launcher: Launcher, tables: ModelTables, responses: ResponseTable, stopping: asyncio.Event
) -> None:
    """Serve until `stopping`; every process has ended then."""
    metrics = RouterMetrics()
    ram = RamLimit(tables.config.ram_max)
    if tables.config.ram_max:
        ram.leave_room(launcher.room_of_router, lambda: 0)
    models = Models(launcher.models(), launcher.room, launcher.process, metrics)
    app = build_app(tables, launcher, models, metrics, responses, ram)
    ram.start()
    try:
        async with listening(app, tables.config) as (_, url):
            tune_gc()
            print(f"towerd is ready: {url} ({len(models.by_name)} models)")
            print(next_steps(url, has_chat_page=bool(app[UI])), flush=True)
            launcher.keep_spare()
            await stopping.wait()
            log.info("stopping")
            await models.close()
    finally:
        await asyncio.to_thread(ram.close)


def build_app(
    tables: ModelTables,
    launcher: Launcher,
    models: Models,
    metrics: RouterMetrics,
    responses: ResponseTable,
    ram: RamLimit,
) -> web.Application:
    """The application in front of `models`. ram: what all processes keep to."""
    app = web.Application(middlewares=(account, guard, authenticate))
    app[CONFIG] = tables.config
    app[TABLES] = tables
    app[LAUNCHER] = launcher
    app[MODELS] = models
    app[CONVERSATIONS] = Conversations()
    app[LIMITS] = Limits().within(tables.config.ram_max)
    app[RAM] = ram
    app[LISTENING] = []
    app[BODIES] = Bodies(tables.config.request_bytes_max, ram, parses=False)
    app[REQUESTS] = metrics
    app[RESPONSES] = responses
    app[TENANTS] = Tenants(tables.config.api_keys)
    app[UI] = ui_files(built_ui())
    app[UI_SETTINGS] = ui_settings(tables.config.llama_server_args)
    app.cleanup_ctx.append(watch_lag)
    app.on_response_prepare.append(add_headers)
    add_routes(app, ROUTES)
    if tables.config.vertex is not None:
        predict.add_routes(app, tables.config.vertex)
    return app


PASSED_GET = (
    "/slots",
    "/lora-adapters",
)
PASSED_POST = (
    "/completion",
    "/completions",
    "/v1/completions",
    "/chat/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/control",
    "/infill",
    "/responses",
    "/v1/responses",
    "/v1/messages",
    "/embedding",
    "/embeddings",
    "/v1/embeddings",
    "/rerank",
    "/reranking",
    "/v1/rerank",
    "/v1/reranking",
    "/chat/completions/input_tokens",
    "/v1/chat/completions/input_tokens",
    "/responses/input_tokens",
    "/v1/responses/input_tokens",
    "/v1/messages/count_tokens",
    "/lora-adapters",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/audio/transcriptions",
    "/v1/audio/transcriptions",
    "/props",
    "/slots/{id_slot}",
)
"""The endpoints of a model's process that are passed on. Those of other paths are unknown here, so that a
mistyped path loads no model."""

PASSED_OLLAMA = ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings")

ROUTES = (
    Route("GET", "/health", routes.get_health),
    Route("GET", "/v1/health", routes.get_health),
    Route("GET", "/props", routes.get_props),
    Route("GET", "/metrics", routes.get_metrics),
    Route("GET", "/models", routes.get_models),
    Route("GET", "/v1/models", routes.get_models),
    Route("POST", "/models", routes.refuse_download),
    Route("DELETE", "/models", routes.refuse_download),
    Route("POST", "/models/load", routes.post_load),
    Route("POST", "/models/unload", routes.post_unload),
    Route("GET", "/models/sse", routes.get_sse),
    Route("GET", "/towerd/v1/address", address.get_address),
    Route("GET", "/towerd/v1/processes", routes.get_processes),
    Route("GET", "/v1/stream", streams.get_stream),
    Route("DELETE", "/v1/stream", streams.delete_stream),
    Route("POST", "/v1/streams/lookup", streams.post_lookup),
    *(Route(*route, unsupported.refuse_disabled) for route in unsupported.DISABLED),
    Route("GET", "/api/version", ollama_models.get_version),
    Route("GET", "/api/tags", ollama.get_tags),
    Route("GET", "/api/ps", ollama.get_ps),
    Route("POST", "/api/show", ollama.post_show),
    Route("POST", "/api/pull", ollama.post_pull),
    *(Route("POST", path, ollama.forward) for path in PASSED_OLLAMA),
    *(Route(*route, ollama_models.refuse) for route in ollama_models.UNSERVED),
    Route("GET", "/cors-proxy", mcp_proxy.forward),
    Route("POST", "/cors-proxy", mcp_proxy.forward),
    *(Route("GET", path, forward_named) for path in PASSED_GET),
    *(Route("POST", path, forward) for path in PASSED_POST),
    Route("GET", "/towerd/v1/requests/{id}/why", ask_whoever_knows),
    Route("POST", "/towerd/v1/workflows/{id}/end", ask_whoever_knows),
    *RESPONSE_ROUTES,
    Route("*", "/towerd/v1/{path:.*}", forward_store),
    Route("GET", "/", page.get_root),
    Route("GET", "/towerd", page.redirect),
    Route("GET", "/towerd/", page.get_explorer),
    Route("GET", "/towerd/page/{name}", page.get_asset),
    Route("GET", "/{file:.+[.][a-z0-9]+}", page.get_file),
)
