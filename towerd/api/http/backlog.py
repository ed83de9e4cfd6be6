"""What clients have not taken yet of their streams.

A generation does not wait for its client: that would occupy its slot and its memory while nobody
reads. What the client has not taken is queued, within bounds, and a task of its own sends it. One
that falls further behind is cut off.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from aiohttp import web

from towerd.api.http.keys import LIMITS
from towerd.api.http.sse import ClientStalled, EventStream, is_keeping_up, write_or_stall

log = logging.getLogger(__name__)

PIECE_BYTES = 64 * 1024
"""Written at once; as much as a transport buffers."""


class Backlogs:
    """The backlogs of all clients. Event loop only."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.waiting: set[Backlog] = set()
        """Those that are not empty."""


class Backlog:
    """The backlog of one streamed reply. Leave its context to drop what is left."""

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self.n_bytes = 0
        self._request = request
        self._response = response
        self._all = request.app[BACKLOGS]
        self._limits = request.app[LIMITS]
        self._parts: deque[bytes] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._error: ConnectionError | None = None

    def __enter__(self) -> Backlog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sending is not None:
            self._sending.cancel()
        self._drop()

    async def write(self, data: bytes) -> None:
        """Send or queue `data`. Raises ClientStalled, ConnectionResetError."""
        if self._error is not None:
            raise self._error
        transport = self._request.transport
        if self._sending is None and transport is not None and is_keeping_up(transport, data):
            await self._response.write(data)
        elif data:
            self._add(data)

    async def sent(self) -> None:
        """Wait until the client has taken all. Raises ClientStalled, ConnectionResetError."""
        if self._sending is not None:
            await self._sending
        if self._error is not None:
            raise self._error

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
                await write_or_stall(self._request, self._response, self._next())
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


class QueuedStream(EventStream):
    """An `EventStream` whose writes do not wait for the client. Leave its context at the end."""

    def __init__(self, request: web.Request) -> None:
        super().__init__(request)
        self._backlog = Backlog(request, self.response)

    def __enter__(self) -> QueuedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._backlog.__exit__()

    async def write(self, data: bytes) -> None:
        """Send or queue encoded events. Raises ClientStalled, ConnectionResetError."""
        await self._backlog.write(data)

    async def close(self) -> None:
        """Wait until the client has taken all. Raises ClientStalled, ConnectionResetError."""
        await self._backlog.sent()
        await super().close()


BACKLOGS = web.AppKey("backlogs", Backlogs)
