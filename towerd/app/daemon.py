"""The web application and the daemon's life cycle: listen, load, serve, shut down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from aiohttp import web

from towerd.api.admin.page import built_ui, ui_files
from towerd.api.http.body import BODIES, Bodies
from towerd.api.http.gate import ApiService, ServiceGate
from towerd.api.http.kept_stream import KeptStreams
from towerd.api.http.keys import (
    CONFIG,
    GATE,
    LIMITS,
    LISTENING,
    METRICS,
    REQUESTS,
    STREAMS,
    TENANTS,
    TRANSFER,
    UI,
    UI_SETTINGS,
)
from towerd.api.http.limits import Limits
from towerd.api.http.metrics import Metrics
from towerd.api.http.middleware import MIDDLEWARES, add_headers
from towerd.api.http.recent_requests import RECENT, RecentRequests
from towerd.api.http.room import RAM
from towerd.api.http.sse import BACKLOGS, Backlogs
from towerd.api.http.tenants import Tenants
from towerd.api.llama import predict
from towerd.api.llama.slots import BOOK
from towerd.api.llama.task import RUNNING
from towerd.api.llama.why import HABITS
from towerd.api.responses.streamed import STREAMED, StreamedResponses
from towerd.app.listening import listening
from towerd.app.loop import run_on_loop, stop_event, tune_gc, watch_lag
from towerd.app.next_steps import next_steps
from towerd.app.routes import ROUTES, add_upstream_routes
from towerd.app.sleep import Sleeper
from towerd.app.store_routes import add_routes
from towerd.sessions.habits import Habits
from towerd.sessions.slot_saves import SlotBook
from towerd.settings.config import Config
from towerd.settings.llama_flags import ui_settings
from towerd.system.ram_limit import RamLimit
from towerd.transfer import Transfer

log = logging.getLogger("towerd.app")


def build_app(
    config: Config,
    *,
    service: ApiService | None = None,
    metrics: Metrics | None = None,
    limits: Limits | None = None,
    ui: Mapping[str, Path] | None = None,
    ram: RamLimit | None = None,
) -> web.Application:
    """The application. Without a `service`, every request except for the page gets 503 "Loading
    model" until `app[GATE].service` is set. ui: the files of llama.cpp's web UI, by their paths
    below `/`; None: there are none, or a llama-server serves its own. ram: what all of it keeps to; None: no limit."""
    ram = ram or RamLimit(address_max=0)
    app = web.Application(middlewares=MIDDLEWARES)
    app[CONFIG] = config
    app[GATE] = ServiceGate(service)
    app[LIMITS] = limits or Limits().within(config.ram_max)
    app[RAM] = ram
    app[LISTENING] = []
    app[METRICS] = app[REQUESTS] = metrics or Metrics()
    app[TENANTS] = Tenants(config.api_keys)
    app[UI] = ui or {}
    app[UI_SETTINGS] = (
        {} if config.engine == "llama-server" else ui_settings(config.llama_server_args)
    )
    app[RUNNING] = {}
    app[STREAMS] = KeptStreams()
    app[STREAMED] = StreamedResponses()
    app[BODIES] = Bodies(config.request_bytes_max, ram)
    app[BACKLOGS] = Backlogs()
    app[TRANSFER] = Transfer()
    app[RECENT] = RecentRequests()
    app[HABITS] = Habits()
    app[BOOK] = SlotBook()
    app.cleanup_ctx.append(watch_lag)
    app.on_cleanup.append(_close_streams)
    app.on_cleanup.append(_close_transfer)
    app.on_cleanup.append(_release_service)
    app.on_response_prepare.append(add_headers)
    if config.engine == "llama-server":
        add_upstream_routes(app)
    else:
        add_routes(app, ROUTES)
    if config.vertex is not None:
        predict.add_routes(app, config.vertex)
    return app


async def _close_streams(app: web.Application) -> None:
    await app[STREAMS].close()


async def _close_transfer(app: web.Application) -> None:
    await asyncio.to_thread(app[TRANSFER].close)


async def _release_service(app: web.Application) -> None:
    """aiohttp caches handlers with their application for the life of the process; a model must not
    stay in memory with them."""
    app[GATE].service = None


@asynccontextmanager
async def open_app(config: Config) -> AsyncIterator[web.Application]:
    """The application with its service, without listening. Raises as `open_service`."""
    ram = RamLimit(config.ram_max)
    async with await asyncio.to_thread(_open_service, config, ram) as service:
        yield build_app(config, service=service, ram=ram)


def _say_ready(has_chat_page: bool, url: str, model: str) -> None:
    print(f"towerd is ready: {url} (model {model})")
    print(next_steps(url, has_chat_page=has_chat_page), flush=True)


def run(config: Config, on_ready: Callable[[str, str], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM. on_ready: gets the URL and the model's name when requests are
    answered; None: that is printed, and what to do next. Raises ConfigError (the address is in use),
    ModelError, StoreError; nothing is left running then."""
    ui = ui_files(built_ui()) if config.engine == "embedded" else None
    say = partial(_say_ready, ui is None or bool(ui))  # a llama-server has its own page
    run_on_loop(_serve(config, on_ready or say, ui))


async def _serve(
    config: Config, on_ready: Callable[[str, str], None], ui: Mapping[str, Path] | None
) -> None:
    name = "The model's share of --ram-max," if config.behind_router else "--ram-max"
    ram = RamLimit(config.ram_max, name=name)
    app = build_app(config, ui=ui, ram=ram)
    stopping = stop_event()
    ram.start()
    try:
        async with listening(app, config) as (runner, url):
            log.info("listening, the model is loading: %s", url)
            await _serve_until(app, runner, config, stopping, partial(on_ready, url))
    finally:
        await asyncio.to_thread(ram.close)


async def _serve_until(
    app: web.Application,
    runner: web.AppRunner,
    config: Config,
    stopping: asyncio.Event,
    on_ready: Callable[[str], None],
) -> None:
    """Load the model, serve, and shut down in order: accept no new requests, finish or cancel the
    running ones, then close engine and store."""
    service = await asyncio.to_thread(_open_service, config, app[RAM])
    loading = asyncio.ensure_future(service.__aenter__())
    asked = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((loading, asked), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            log.info("stopping; the model finishes loading first")
        loaded = await loading
    except BaseException:
        asked.cancel()
        raise
    opening = partial(asyncio.to_thread, _open_service, config, app[RAM])
    sleeper = Sleeper(app, service, opening, stopping)
    try:
        await asyncio.to_thread(tune_gc)
        app[GATE].woken(loaded)
        if not asked.done():
            on_ready(loaded.engine.info.alias)
        del loaded
        await sleeper.serve()
        log.info("stopping")
        app[GATE].closing = True
        if (awake := app[GATE].service) is not None:
            await awake.engine.drain(app[LIMITS].grace_s)
        await runner.cleanup()
    finally:
        asked.cancel()
        await sleeper.close()


def _open_service(config: Config, ram: RamLimit) -> AbstractAsyncContextManager[ApiService]:
    # Imported late, so that /health answers before the import.
    from towerd.service import open_service

    return open_service(config, ram)
