"""The connection to llama-server: raw requests, and the tasks that continue after their client left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from aiohttp import ClientResponse, web

from towerd.api.http.keys import service_of
from towerd.engine.llama_server.engine import LlamaServerEngine
from towerd.engine.llama_server.process.client import Body, Lost, NotHttp, Unreachable
from towerd.errors import TowerdError

LOST = "llama-server ended while it answered; try again"
_BAD_HTTP = "llama-server's reply is not valid HTTP"
_DOWN = "llama-server is not running at the moment; try again"


def llama_server_of(request: web.Request) -> LlamaServerEngine:
    """The engine behind the proxy; see `service_of`."""
    return cast(LlamaServerEngine, service_of(request).engine)


class Link:
    """The connection to llama-server, and the tasks that continue after their client has left."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._unattended: set[asyncio.Event] = set()
        self._is_closing = False

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """For `app.cleanup_ctx`."""
        yield
        self._is_closing = True
        for leaving in self._unattended:
            leaving.set()
        while self._tasks:
            await asyncio.wait(self._tasks)

    @contextmanager
    def unattended(self) -> Iterator[asyncio.Event]:
        """A context for reading a reply without a client; the event is set at shutdown."""
        leaving = asyncio.Event()
        if self._is_closing:
            leaving.set()
        self._unattended.add(leaving)
        try:
            yield leaving
        finally:
            self._unattended.discard(leaving)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in a task of its own, independent of its request."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def request(
        self,
        engine: LlamaServerEngine,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Body = None,
    ) -> ClientResponse:
        """Send one request unchanged (`path` is quoted, with its query) and return when the reply's
        head is there. Raises Unavailable if llama-server is unavailable, TowerdError if its reply
        cannot be read, and the errors of iterating the body."""
        if not engine.is_running:
            raise engine.failure(_DOWN)
        try:
            return await engine.upstream.send(method, path, headers, body)
        except NotHttp as error:
            raise TowerdError(_BAD_HTTP) from error
        except (Lost, Unreachable) as error:
            failure = engine.failure(LOST if isinstance(error, Lost) else _DOWN)
            # llama-server closes the connection on a body that it refuses; it may still be well.
            if not isinstance(body, AsyncIterator):
                engine.notice(failure)
            raise failure from error


LINK = web.AppKey("link", Link)
