"""The service in this process, for commands that need the model while no daemon runs."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from aiohttp import web

from towerd.app import build_app
from towerd.cli.daemon import DaemonBackend
from towerd.config import Config
from towerd.service import open_service


class PrivateDaemon:
    """Engine and store on a thread of their own, answering on a socket in a folder that only
    this user can enter. A context manager that gives the backend to ask it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="towerctl-")
        self._ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=self._run, name="towerctl-service", daemon=True)
        self._failure: BaseException | None = None
        self._backend = DaemonBackend.at_socket(Path(self._folder.name) / "s")

    def __enter__(self) -> DaemonBackend:
        """Raises what `open_service` raises."""
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self._folder.cleanup()
            raise
        return self._backend

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait until everything is stored. Raises what went wrong at that."""
        self._backend.close()
        loop, stop = self._ready.result()
        loop.call_soon_threadsafe(stop.set)
        self._thread.join()
        self._folder.cleanup()
        if self._failure is not None and error is None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _serve(self) -> None:
        async with open_service(self._config) as service:
            app = build_app(self._config, service=service)
            runner = web.AppRunner(
                app, access_log=None, handler_cancellation=True, shutdown_timeout=1
            )
            await runner.setup()
            try:
                await web.UnixSite(runner, str(Path(self._folder.name) / "s")).start()
                stop = asyncio.Event()
                self._ready.set_result((asyncio.get_running_loop(), stop))
                await stop.wait()
            finally:
                await runner.cleanup()
