"""Listening on TCP ports and on the Unix socket."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aiohttp import web

from towerd.api.http.connection import ConnectionRunner
from towerd.api.http.keys import LIMITS, LISTENING
from towerd.errors import ConfigError
from towerd.settings.config import Config

BACKLOG = 512
UNIX_BACKLOG = 4096
"""A Unix socket refuses what is beyond it at once, where clients of TCP try again."""


@asynccontextmanager
async def listening(
    app: web.Application, config: Config
) -> AsyncIterator[tuple[ConnectionRunner, str]]:
    """Serve `app` where `config` says; yields its runner and first URL, and stops at the end. Behind
    a router that is the Unix socket alone; else the app knows its URLs. Raises ConfigError."""
    runner = ConnectionRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=app[LIMITS].linger_s,
    )
    await runner.setup()
    bound: Path | None = None
    try:
        url = f"unix:{config.socket}" if config.behind_router else await _tcp(runner, config)
        bound = await _unix(runner, config.socket)
        yield runner, url
    finally:
        await runner.cleanup()
        if bound is not None:
            with suppress(OSError):
                bound.unlink()


async def _tcp(runner: web.AppRunner, config: Config) -> str:
    """Listen on host:port, for each host, and return the first URL. Raises ConfigError."""
    port = config.port
    urls: list[str] = runner.app[LISTENING]
    for host in (host.strip("[]") for host in config.hosts):
        site = web.TCPSite(runner, host, port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(_why_not(error, host, port)) from error
        port = next(a[1] for a in runner.addresses if isinstance(a, tuple))
        urls.append(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    return urls[0]


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {port} on {host} is in use: stop the other program, "
            "or choose another port with --port."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Port {port} on {host} may not be opened by this user: choose one above 1023."
    return f"Cannot listen on {host} port {port}: {error.strerror or error}."


async def _unix(runner: web.AppRunner, path: Path | None) -> Path | None:
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
    await web.SockSite(runner, sock, backlog=UNIX_BACKLOG).start()
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
