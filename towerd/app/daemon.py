"""The web application and the daemon's life cycle: listen, load, serve, shut down."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import uvloop
from aiohttp import web

from towerd.api.http.connection import ConnectionRunner
from towerd.api.http.kept_stream import KeptStreams
from towerd.api.http.keys import (
    CONFIG,
    GATE,
    LIMITS,
    METRICS,
    STREAMS,
    TENANTS,
    TRANSFER,
    UI,
    ApiService,
    ServiceGate,
)
from towerd.api.http.limits import Limits
from towerd.api.http.metrics import Metrics
from towerd.api.http.middleware import MIDDLEWARES, add_headers
from towerd.api.http.recent import RECENT, RecentRequests
from towerd.api.http.tenants import Tenants
from towerd.api.llama.task import RUNNING
from towerd.api.llama.ui import built_ui, ui_files
from towerd.app.routes import ROUTES, add_proxy_routes
from towerd.app.store_routes import add_routes
from towerd.errors import ConfigError
from towerd.settings.config import Config
from towerd.system.priority import shorten_slice
from towerd.transfer import Transfer

log = logging.getLogger("towerd.app")

LAG_PROBE_S = 0.25
SWITCH_INTERVAL_S = 0.001
BACKLOG = 512
GC_THRESHOLDS = (5000, 10, 1000)


def build_app(
    config: Config,
    *,
    service: ApiService | None = None,
    metrics: Metrics | None = None,
    limits: Limits | None = None,
    ui: Mapping[str, Path] | None = None,
) -> web.Application:
    """The application. Without a `service`, every request except for the page gets 503 "Loading
    model" until `app[GATE].service` is set. ui: the files of llama.cpp's web UI, by their paths
    below `/`; None: there are none, or a llama-server serves its own."""
    app = web.Application(middlewares=MIDDLEWARES)
    app[CONFIG] = config
    app[GATE] = ServiceGate(service)
    app[LIMITS] = limits or Limits()
    app[METRICS] = metrics or Metrics()
    app[TENANTS] = Tenants(config.api_keys)
    app[UI] = ui or {}
    app[RUNNING] = {}
    app[STREAMS] = KeptStreams()
    app[TRANSFER] = Transfer()
    app[RECENT] = RecentRequests()
    app.cleanup_ctx.append(_watch_loop)
    app.on_cleanup.append(_close_streams)
    app.on_cleanup.append(_close_transfer)
    app.on_cleanup.append(_release_service)
    app.on_response_prepare.append(add_headers)
    if config.engine == "llama-server":
        add_proxy_routes(app)
    else:
        add_routes(app, ROUTES)
    return app


async def _close_streams(app: web.Application) -> None:
    await app[STREAMS].close()


async def _close_transfer(app: web.Application) -> None:
    await asyncio.to_thread(app[TRANSFER].close)


async def _watch_loop(app: web.Application) -> AsyncIterator[None]:
    """Measure how late the loop runs a timer."""

    async def probe() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            app[METRICS].lag.observe(max(loop.time() - due, 0.0))

    task = asyncio.create_task(probe())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _release_service(app: web.Application) -> None:
    """aiohttp caches handlers with their application for the life of the process; a model must not
    stay in memory with them."""
    app[GATE].service = None


@asynccontextmanager
async def open_app(config: Config) -> AsyncIterator[web.Application]:
    """The application with its service, without listening. Raises as `open_service`."""
    async with await asyncio.to_thread(_open_service, config) as service:
        yield build_app(config, service=service)


def run(config: Config) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError (the address is in use), ModelError,
    StoreError; nothing is left running then."""
    # A worker thread that runs Python yields to the event loop after this long.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    shorten_slice()
    ui = ui_files(built_ui()) if config.engine == "embedded" else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, ui))


def tune_gc() -> None:
    """Keep Python's garbage collector from blocking the event loop: what is loaded (the prefix tree
    of a big store is a million objects) is never traversed again, and full collections become rare.
    There is no collection now either: imports leave little garbage."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


async def _serve(config: Config, ui: Mapping[str, Path] | None) -> None:
    app = build_app(config, ui=ui)
    limits = app[LIMITS]
    runner = ConnectionRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=limits.linger_s,
    )
    stopping = _stop_event()
    await runner.setup()
    bound: Path | None = None
    try:
        url = await _listen_tcp(runner, config)
        bound = await _listen_unix(runner, config.socket)
        log.info("listening, the model is loading: %s", url)
        await _serve_until(app, runner, config, stopping, url)
    finally:
        await runner.cleanup()
        if bound is not None:
            with suppress(OSError):
                bound.unlink()


async def _serve_until(
    app: web.Application,
    runner: web.AppRunner,
    config: Config,
    stopping: asyncio.Event,
    url: str,
) -> None:
    """Load the model, serve, and shut down in order: accept no new requests, finish or cancel the
    running ones, then close engine and store."""
    service = await asyncio.to_thread(_open_service, config)
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
    try:
        await asyncio.to_thread(tune_gc)
        app[GATE].service = loaded
        if not asked.done():
            print(f"towerd is ready: {url} (model {loaded.engine.info.alias})", flush=True)
        await asked
        log.info("stopping")
        app[GATE].closing = True
        await loaded.engine.drain(app[LIMITS].grace_s)
        await runner.cleanup()
    finally:
        await service.__aexit__(None, None, None)


def _open_service(config: Config) -> AbstractAsyncContextManager[ApiService]:
    # Imported late, so that /health answers before the import.
    from towerd.service import open_service

    return open_service(config)


def _stop_event() -> asyncio.Event:
    """An event set by SIGINT or SIGTERM; a second signal ends the process immediately."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        if event.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        event.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    return event


async def _listen_tcp(runner: web.AppRunner, config: Config) -> str:
    """Listen on host:port, for each host, and return the first URL. Raises ConfigError."""
    port = config.port
    for host in (host.strip("[]") for host in config.hosts):
        site = web.TCPSite(runner, host, port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(_why_not(error, host, port)) from error
        port = next(a[1] for a in runner.addresses if isinstance(a, tuple))
    first = config.hosts[0].strip("[]")
    return f"http://{f'[{first}]' if ':' in first else first}:{port}"


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {port} on {host} is in use: stop the other program, "
            "or choose another port with --port."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Port {port} on {host} may not be opened by this user: choose one above 1023."
    return f"Cannot listen on {host} port {port}: {error.strerror or error}."


async def _listen_unix(runner: web.AppRunner, path: Path | None) -> Path | None:
    """Listen on the Unix socket, which only this user may open; returns the bound path.

    Raises ConfigError."""
    if path is None:
        return None
    try:
        sock = await asyncio.to_thread(bind_unix, path)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on the socket {path}: {error.strerror or error}. "
            "Give another with --socket."
        ) from error
    await web.SockSite(runner, sock, backlog=BACKLOG).start()
    return path


def bind_unix(path: Path) -> socket.socket:
    """A socket bound under a private name and renamed into place: its mode is never wider than
    0600, and a running daemon's socket is never taken over."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "a file of another kind has this name")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, "another daemon is listening there")
    temporary = path.with_name(f".{os.getpid()}.sock")
    temporary.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX)
    try:
        old = os.umask(0o177)
        try:
            sock.bind(str(temporary))
        finally:
            os.umask(old)
        os.chmod(temporary, 0o600)
        os.replace(temporary, path)
    except BaseException:
        sock.close()
        temporary.unlink(missing_ok=True)
        raise
    sock.setblocking(False)
    return sock
