"""One client's connection: where towerd differs from aiohttp below the application.

A request that is not valid HTTP gets an error in llama-server's shape and one line in the log.

A client may shut down its sending side after its request and still read the reply. It differs from
a client that closed the whole connection only in how it reacts to data: the latter answers with a
reset. So the first bytes, which all replies have in common, are sent before the reply exists, and a
client that is gone is detected early.
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
"""The bytes that every reply begins with."""
LOOK_S_MIN = 0.05
LOOK_S_MAX = 1.0
"""The pause between two checks of a half-closed connection grows from the first to the second."""


class StartedTransport:
    """A transport on which the first bytes of the next reply have already been sent."""

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport
        self._n_out = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send_more(self) -> None:
        """Send one more of the bytes that every reply begins with, if any is left."""
        if self._n_out < len(COMMON):
            self._n_out += 1
            self._transport.write(COMMON[self._n_out - 1 : self._n_out])

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data`, the start of a reply, without the bytes already sent. The connection then
        uses the plain transport again."""
        self._connection.transport = self._transport
        self._transport.write(data[self._n_out :])

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        """See `write`."""
        self.write(b"".join(parts))


class Connection(RequestHandler):
    """The connection of one client, made by `ConnectionRunner`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_half_closed = False
        self._n_answered = 0

    @property
    def _is_serving(self) -> bool:
        """Whether a request of the client has not been answered completely."""
        return self._n_answered < self._request_count

    def data_received(self, data: bytes) -> None:
        n_before = len(self._messages)
        super().data_received(data)
        if len(self._messages) > n_before and self._is_refused():
            self._end_bodies("its chunks are malformed")

    def _is_refused(self) -> bool:
        """Whether the last message is not valid HTTP."""
        return not isinstance(self._messages[-1][0], RawRequestMessage)

    def _end_bodies(self, reason: str) -> None:
        """No more body data will arrive: reading an incomplete body fails from now on."""
        bodies = [body for _, body in self._messages]
        if self._current_request is not None:
            bodies.append(self._current_request.content)
        for body in bodies:
            if not body.is_eof() and body.exception() is None:
                body.set_exception(web.RequestPayloadError(reason))

    # ---- half-closed connections ------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client will send nothing more. Returns whether to stay open for unanswered requests.
        The loop calls this again whenever reading is resumed."""
        if not self._is_serving:
            return False
        if self._is_half_closed:
            return True
        self._is_half_closed = True
        has_begun = self._current_request is not None and self._current_request.writer.output_size
        if self.transport is not None and not has_begun:
            self.transport = cast(asyncio.Transport, StartedTransport(self, self.transport))
        self._look(LOOK_S_MIN)
        return True

    def _look(self, pause_s: float) -> None:
        """Check whether the client is still there, and check again after a pause."""
        transport = self.transport
        if transport is None:
            return
        self._end_bodies("it ended early")
        if transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
            return
        if isinstance(transport, StartedTransport):
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
        """The reply if no handler has answered. Raises ConnectionError if a reply has begun, or its client
        has left."""
        if isinstance(exc, ConnectionError) and (
            request.transport is None or request.transport.is_closing()
        ):
            raise exc  # the client left in the middle of its reply
        error: TowerdError
        if isinstance(exc, HttpProcessingError):
            error = InvalidRequest(f"Malformed HTTP request: {reason_of(exc)}")
            log.info("malformed request", extra={"client": request.remote, "error": error.message})
        else:
            error = TowerdError("Internal error; the daemon's log has it")
            path = request.rel_url.raw_path
            log.error("request failed: %s %s", request.method, path, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the reply has begun")
        reply = error_reply(error, {"Server": "towerd"})
        reply.force_close()
        return reply

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log failures outside of handlers, except bodies that could not be read."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError | HttpProcessingError):
            super().log_exception(*args, **kwargs)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a reply. aiohttp's own errors get the shape of ours. A half-closed connection is
        closed after its last reply."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = error_reply(from_http(resp), path=request.path)
        finished = await super().finish_response(request, resp, start_time)
        self._n_answered += 1
        if self._is_half_closed and not self._is_serving:
            self.close()
        return finished


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class ConnectionRunner(web.AppRunner):
    """Runs an application that is served through `Connection`s."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
