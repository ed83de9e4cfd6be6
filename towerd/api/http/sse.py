"""Server-sent events, or lines of JSON, to a client that may stop reading.

A generation does not wait for its client: that would occupy its slot and its memory while nobody
reads. What the client has not taken is queued, within bounds, and a task of its own sends it. One
that falls further behind is cut off.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import hdrs, web

from towerd.api.http.access import is_owner_socket
from towerd.api.http.keys import LIMITS
from towerd.api.http.reply import encode, error_event
from towerd.api.http.translation import NDJSON, TRANSLATION
from towerd.errors import TowerdError

log = logging.getLogger(__name__)

PIECE_BYTES = 64 * 1024
"""Of what is queued this much is written at once; as much as a transport buffers."""
INLINE_BYTES_MAX = 16 * 1024
"""Less than any transport buffers before the writer has to wait."""
PING = b":\n\n"
"""A comment that keeps clients and proxies from timing out."""
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ClientStalled(ConnectionError):
    """The client read nothing for `write_stall_s`; its connection was closed."""


async def write_or_stall(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write to a client, waiting for it up to `write_stall_s`. The reply to a HEAD has no body.

    Raises ClientStalled, ConnectionResetError."""
    if not data or request.method == hdrs.METH_HEAD:
        return
    if request.transport is not None and is_keeping_up(request.transport, data):
        await response.write(data)
        return
    try:
        async with asyncio.timeout(request.app[LIMITS].write_stall_s):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ClientStalled("the client stopped reading") from None


async def write_all(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write a whole file to a client, waiting up to `write_stall_s` for each piece. Raises ClientStalled,
    ConnectionResetError."""
    for at in range(0, len(data), PIECE_BYTES):
        await write_or_stall(request, response, data[at : at + PIECE_BYTES])


def is_keeping_up(transport: asyncio.WriteTransport, data: bytes) -> bool:
    """Whether a write cannot block, so that it needs no timer: a timer for every token would add a
    tenth to the cost of passing it on."""
    return transport.get_write_buffer_size() + len(data) <= INLINE_BYTES_MAX


class EventStream:
    """A `text/event-stream` response, or lines of JSON if the request's reply is translated. A write waits
    for the client up to `write_stall_s`."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._translation = request.get(TRANSLATION)
        self.response = web.StreamResponse(headers=_HEADERS)
        if self._translation is not None:
            self.response.headers["Content-Type"] = NDJSON

    async def open(self, headers: Mapping[str, str]) -> None:
        """Send these headers and those of every stream. Must be called before any write."""
        self.response.headers.update(headers)
        await self.response.prepare(self._request)

    async def send(self, values: Iterable[Any]) -> None:
        """Send one `data:` event per value. Raises ClientStalled, ConnectionResetError."""
        await self.write(b"".join(b"data: %s\n\n" % encode(value) for value in values))

    async def write(self, data: bytes) -> None:
        """Write encoded events. Raises ClientStalled, ConnectionResetError."""
        await write_or_stall(self._request, self.response, self._shaped(data))

    def _shaped(self, data: bytes) -> bytes:
        return data if self._translation is None else self._translation.feed(data)

    async def close(self) -> None:
        await self.response.write_eof()


@asynccontextmanager
async def event_stream(request: web.Request) -> AsyncIterator[EventStream]:
    """A stream that is open inside; a TowerdError that is raised there is its last event."""
    stream = EventStream(request)
    await stream.open({})
    try:
        yield stream
    except TowerdError as error:
        await stream.write(error_event(request.path, error, in_full=is_owner_socket(request)))
    await stream.close()


class Backlogs:
    """What all clients together have not taken. Event loop only."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.waiting: set[QueuedStream] = set()
        """Those with a backlog."""


BACKLOGS = web.AppKey("backlogs", Backlogs)


class QueuedStream(EventStream):
    """An `EventStream` whose writes do not wait for the client. Leave its context at the end, which
    drops what is left."""

    def __init__(self, request: web.Request) -> None:
        super().__init__(request)
        self.n_bytes = 0
        """Bytes that are queued."""
        self._all = request.app[BACKLOGS]
        self._limits = request.app[LIMITS]
        self._parts: deque[bytes] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._error: ConnectionError | None = None

    def __enter__(self) -> QueuedStream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sending is not None:
            self._sending.cancel()
        self._drop()

    async def write(self, data: bytes) -> None:
        """Send or queue encoded events. Raises ClientStalled, ConnectionResetError."""
        if self._error is not None:
            raise self._error
        data = self._shaped(data)
        transport = self._request.transport
        if self._sending is None and transport is not None and is_keeping_up(transport, data):
            await self.response.write(data)
        elif data:
            self._add(data)

    async def close(self) -> None:
        """Wait until the client has taken all. Raises ClientStalled, ConnectionResetError."""
        if self._sending is not None:
            await self._sending
        if self._error is not None:
            raise self._error
        await super().close()

    def _add(self, data: bytes) -> None:
        self._parts.append(data)
        self.n_bytes += len(data)
        self._all.n_bytes += len(data)
        self._all.waiting.add(self)
        if self.n_bytes > self._limits.backlog_bytes_max:
            self._cut_off()
        elif self._all.n_bytes > self._limits.backlogs_bytes_max:
            max(self._all.waiting, key=lambda each: each.n_bytes)._cut_off()
        if self._error is not None:
            raise self._error
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._parts:
                await write_or_stall(self._request, self.response, self._next())
        except ConnectionError as error:
            self._error = self._error or error
            self._drop()
        finally:
            self._sending = None

    def _next(self) -> bytes:
        """The next of what is queued, about `PIECE_BYTES`."""
        parts = [self._parts.popleft()]
        n_bytes = len(parts[0])
        while self._parts and n_bytes + len(self._parts[0]) <= PIECE_BYTES:
            parts.append(self._parts.popleft())
            n_bytes += len(parts[-1])
        self._count(-n_bytes)
        return b"".join(parts)

    def _cut_off(self) -> None:
        """Close the connection. What was generated is kept as of any client that leaves."""
        log.warning("a client fell too far behind its stream, and was cut off")
        self._error = ClientStalled("the client reads too slowly")
        self._drop()
        if self._request.transport is not None:
            self._request.transport.abort()

    def _drop(self) -> None:
        self._parts.clear()
        self._count(-self.n_bytes)

    def _count(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        self._all.n_bytes += n_bytes
        if not self.n_bytes:
            self._all.waiting.discard(self)
