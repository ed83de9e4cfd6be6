"""One client's connection: where towerd differs from aiohttp below the application.

A body is neither asked for (`Expect: 100-continue`) nor unpacked before a handler reads it, so that a
client that is refused sends nothing. What is left of it behind the reply is dropped within bounds.

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
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, cast

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict, CIMultiDictProxy

from towerd.api.http.reply import error_reply, from_http, reason_of
from towerd.errors import InvalidRequest, TowerdError

log = logging.getLogger(__name__)

WAITS = web.RequestKey("waits", bool)
"""Whether the client waits for the word to send its body."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMON = b"HTTP/1."
"""The bytes that every reply begins with."""
LEFT_S_MAX = 5.0
"""How long the rest of a body that was not read may arrive behind the reply. A connection that is
closed while data arrives is reset, and the client may lose the reply."""
LEFT_BYTES_MAX = 16 << 20
"""How much of it may arrive."""
LEFT_BYTES_KEPT = 64 * 1024
"""Behind a body up to this length the connection is used again."""
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
        self._n_left: int | None = None
        """How much of a body was dropped behind the reply; None: nothing is to be dropped."""
        self._all_left = self._loop.create_future()
        """Done when no more of it is dropped."""

    @property
    def _is_serving(self) -> bool:
        """Whether a request of the client has not been answered completely."""
        return self._n_answered < self._request_count

    def data_received(self, data: bytes) -> None:
        if self._n_left is not None:
            self._drop(data)
            return
        n_before = len(self._messages)
        super().data_received(data)
        if len(self._messages) > n_before and self._is_refused():
            self._forget_frames()
            self._end_bodies("its chunks are malformed")

    def _is_refused(self) -> bool:
        """Whether the last message is not valid HTTP."""
        return not isinstance(self._messages[-1][0], RawRequestMessage)

    def _forget_frames(self) -> None:
        """Keep why the last message is refused without the frames that raised it: these have what was
        received, and lie in a circle with it that the rare full collections alone would free."""
        why: BaseException | None = self._messages[-1][0].exc  # type: ignore[union-attr]
        while why is not None:
            why.__traceback__, why = None, why.__context__

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
            error = TowerdError("Internal error; see the daemon's log")
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
        is_left = not request.content.is_eof()
        is_kept = is_left and not request.get(WAITS) and 0 < _n_bytes(request) <= LEFT_BYTES_KEPT
        if is_left and not is_kept and not resp.prepared:
            resp.force_close()
        finished = await super().finish_response(request, resp, start_time)
        self._n_answered += 1
        if self._is_half_closed and not self._is_serving:
            self.close()
        elif is_left and not self._is_half_closed:
            with suppress(TimeoutError, web.RequestPayloadError):
                async with asyncio.timeout(LEFT_S_MAX):
                    await (_read_left(request) if is_kept else self._drop_left())
        return finished

    async def _drop_left(self) -> None:
        """Tell the client that this connection ends, and drop what it still sends."""
        transport = self.transport
        if transport is None:
            return
        self._n_left = 0
        transport.write_eof()
        with suppress(RuntimeError):  # it is reading
            transport.resume_reading()
        await self._all_left

    def _drop(self, data: bytes) -> None:
        assert self._n_left is not None
        self._n_left += len(data)
        if self._n_left > LEFT_BYTES_MAX and not self._all_left.done():
            self._all_left.set_result(None)


def _n_bytes(request: web.BaseRequest) -> int:
    """The length of its body; 0 if that is not known."""
    return request.content_length or 0


async def _read_left(request: web.BaseRequest) -> None:
    """Read a body to its end."""
    while not request.content.is_eof():
        await request.content.readany()


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class ConnectionRunner(web.AppRunner):
    """Runs an application that is served through `Connection`s."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=_deferring(made.request_factory),
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            auto_decompress=False,
            lingering_time=0.0,
            **made._kwargs,
        )


def _deferring(make: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """As `make`, but nobody is told to send a body before it is read."""

    def factory(message: RawRequestMessage, *args: Any) -> web.BaseRequest:
        if message.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
            return make(message, *args)  # other expectations are aiohttp's to refuse
        headers = CIMultiDict(message.headers)
        del headers[hdrs.EXPECT]  # aiohttp would answer it at once
        request = make(message._replace(headers=CIMultiDictProxy(headers)), *args)
        request[WAITS] = True
        return request

    return factory


async def let_send(request: web.Request) -> None:
    """Tell the client to send its body, if it waits for that."""
    if request.get(WAITS) and request.version >= HttpVersion11:
        request[WAITS] = False
        await request.writer.write(_CONTINUE)
        request.writer.output_size = 0  # a reply has not begun
