"""Server-sent events to a client that may stop reading."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from aiohttp import web

from towerd.api.http.keys import LIMITS
from towerd.api.http.reply import encode

INLINE_BYTES_MAX = 16 * 1024
"""Less than any transport buffers before it makes the writer wait."""
PING = b":\n\n"
"""A comment that keeps impatient clients and proxies waiting."""
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ClientStalled(ConnectionError):
    """The client took nothing for `write_stall_s`; its connection is gone."""


async def write_or_stall(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write to a client, waiting for it up to `write_stall_s`.

    Raises ClientStalled, ConnectionResetError."""
    if not data:
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


def is_keeping_up(transport: asyncio.WriteTransport, data: bytes) -> bool:
    """Whether writing cannot wait: a timer for every token of a stream would be a tenth of what
    passing it on costs."""
    return transport.get_write_buffer_size() + len(data) <= INLINE_BYTES_MAX


class Sink(Protocol):
    """What events are written to: a client, or something that keeps them."""

    async def open(self, headers: Mapping[str, str]) -> None:
        """There is something to write, under these headers; at most once, before any `write`."""
        ...

    async def write(self, data: bytes) -> None:
        """Events as they are. Raises ClientStalled, ConnectionResetError."""
        ...


class EventStream:
    """A `text/event-stream` response. Writing waits for the client, but not for ever."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS)

    async def open(self, headers: Mapping[str, str]) -> None:
        """Send these headers and what every stream has. What is written before is an error."""
        self.response.headers.update(headers)
        await self.response.prepare(self._request)

    async def send(self, values: Iterable[Any]) -> None:
        """One `data:` event per value. Raises ClientStalled, ConnectionResetError."""
        await self.write(b"".join(b"data: %s\n\n" % encode(value) for value in values))

    async def write(self, data: bytes) -> None:
        """Events as they are. Raises ClientStalled, ConnectionResetError."""
        await write_or_stall(self._request, self.response, data)

    async def close(self) -> None:
        await self.response.write_eof()
