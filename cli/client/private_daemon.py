"""An application in this process, for towerctl while no daemon is running."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType

from aiohttp import web

from towerd.cli.client.api_client import ApiClient
from towerd.system.folders import socket_folder


class PrivateDaemon:
    """Serves an application from a thread of its own, on a socket in a folder that only this user
    can enter. A context manager that returns a client of it."""

    def __init__(
        self, app: AbstractAsyncContextManager[web.Application], where: Path, *, has_model: bool
    ) -> None:
        """`where`: the directory of its store, for people."""
        self._app = app
        self._folder = socket_folder("towerctl-")
        self._socket = Path(self._folder.name) / "s"
        self._ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=self._run, name="towerctl-service", daemon=True)
        self._failure: BaseException | None = None
        self._backend = ApiClient.at_socket(self._socket, str(where), has_model=has_model)

    def __enter__(self) -> ApiClient:
        """Start serving. Raises the errors of opening the application."""
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
        """Wait until everything is stored. Raises the errors of closing the application."""
        self._backend.close()
        loop, stop = self._ready.result()
        loop.call_soon_threadsafe(stop.set)
        self._thread.join()
        self._folder.cleanup()
        if self._failure is not None and error is None:
            raise self._failure

    def _run(self) -> None:
        # The command prints the error, so it is not logged as well.
        log = logging.getLogger("towerd.api")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            log.setLevel(level)

    async def _serve(self) -> None:
        async with self._app as app:
            runner = web.AppRunner(
                app, access_log=None, handler_cancellation=True, shutdown_timeout=1
            )
            await runner.setup()
            try:
                await web.UnixSite(runner, str(self._socket)).start()
                stop = asyncio.Event()
                self._ready.set_result((asyncio.get_running_loop(), stop))
                await stop.wait()
            finally:
                await runner.cleanup()
