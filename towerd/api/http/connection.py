"""One client's connection: what aiohttp does below the application, where towerd does it otherwise.

What is no HTTP gets an error of llama-server's shape, and the log one line.

A client may close its side of the connection behind its request and still read the reply. Nothing
tells it from one that has closed all of it, but what becomes of bytes that are sent: the latter
answers them with a reset. So the first bytes of the reply, which all replies have in common, are
sent before there is one, and a client that is gone is noticed as soon as one that says so.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from typing import Any, cast

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from towerd.api.http.reply import error_reply, from_http, reason_of
from towerd.errors import InvalidRequest, TowerdError

log = logging.getLogger(__name__)


COMMON = b"HTTP/1."
"""What every reply begins with."""
LOOK_S_MIN = 0.05
LOOK_S_MAX = 1.0
"""How long after the last look at a half-closed connection the next one is."""


class Begun:
    """A transport on which the first bytes of the next reply are out already."""

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport
        self._n_out = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send_more(self) -> None:
        """Send another byte, if there is one that is certain."""
        if self._n_out < len(COMMON):
            self._n_out += 1
            self._transport.write(COMMON[self._n_out - 1 : self._n_out])

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send the rest of a reply's beginning; the connection goes on without this object."""
        self._connection.transport = self._transport
        self._transport.write(data[self._n_out :])

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        """As `write`."""
        self.write(b"".join(parts))


class Connection(RequestHandler):
    """Made by `Runner` for each client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_half_closed = False
        self._n_answered = 0

    @property
    def _is_serving(self) -> bool:
        """Whether the client has asked for something that it has not got all of."""
        return self._n_answered < self._request_count

    def data_received(self, data: bytes) -> None:
        n_before = len(self._messages)
        super().data_received(data)
        if len(self._messages) > n_before and self._is_refused():
            self._end_bodies("its chunks are malformed")

    def _is_refused(self) -> bool:
        """Whether what arrived last is no HTTP."""
        return not isinstance(self._messages[-1][0], RawRequestMessage)

    def _end_bodies(self, reason: str) -> None:
        """No more of any body will arrive; one that is not complete cannot be read."""
        bodies = [body for _, body in self._messages]
        if self._current_request is not None:
            bodies.append(self._current_request.content)
        for body in bodies:
            if not body.is_eof() and body.exception() is None:
                body.set_exception(web.RequestPayloadError(reason))

    # ---- half-closed connections ------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client will send nothing more; whether to stay open for what it has asked. The loop
        says so again whenever reading is resumed."""
        if not self._is_serving:
            return False
        if self._is_half_closed:
            return True
        self._is_half_closed = True
        has_begun = self._current_request is not None and self._current_request.writer.output_size
        if self.transport is not None and not has_begun:
            self.transport = cast(asyncio.Transport, Begun(self, self.transport))
        self._look(LOOK_S_MIN)
        return True

    def _look(self, pause_s: float) -> None:
        """See whether the client is still there; again after a pause."""
        transport = self.transport
        if transport is None:
            return
        self._end_bodies("it ended early")
        if transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
            return
        if isinstance(transport, Begun):
            transport.send_more()
        self._loop.call_later(pause_s, self._look, min(2 * pause_s, LOOK_S_MAX))

    # ---- replies ----------------------------------------------------------------------------

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The reply to what no handler has answered. Raises ConnectionError where one was begun."""
        error: TowerdError
        if isinstance(exc, HttpProcessingError):
            error = InvalidRequest(f"Malformed HTTP request: {reason_of(exc)}")
            log.info("malformed request", extra={"client": request.remote, "error": error.message})
        else:
            error = TowerdError("Internal error; the daemon's log has it")
            log.error("request failed: %s %s", request.method, request.path, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the reply has begun")
        reply = error_reply(error, {"Server": "towerd"})
        reply.force_close()
        return reply

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log what went wrong outside of handlers; a body that could not be read is no news."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError | HttpProcessingError):
            super().log_exception(*args, **kwargs)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a reply. A refusal of aiohttp's own gets llama-server's shape; after the last reply
        of a half-closed connection it is closed."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = error_reply(from_http(resp))
        finished = await super().finish_response(request, resp, start_time)
        self._n_answered += 1
        if self._is_half_closed and not self._is_serving:
            self.close()
        return finished


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """An application behind `Connection`s."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
