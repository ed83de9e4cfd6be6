"""Server-sent events to a client that may stop reading."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from aiohttp import web

from towerd.api.http.keys import LIMITS
from towerd.api.http.reply import encode

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
    """Whether a write cannot block, so that it needs no timer: a timer for every token would add a
    tenth to the cost of passing it on."""
    return transport.get_write_buffer_size() + len(data) <= INLINE_BYTES_MAX


class Sink(Protocol):
    """Where events are written: a client, or a `KeptStream`."""

    async def open(self, headers: Mapping[str, str]) -> None:
        """Begin with these headers; called at most once, before any `write`."""
        ...

    async def write(self, data: bytes) -> None:
        """Write encoded events. Raises ClientStalled, ConnectionResetError."""
        ...


class EventStream:
    """A `text/event-stream` response. A write waits for the client up to `write_stall_s`."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS)

    async def open(self, headers: Mapping[str, str]) -> None:
        """Send these headers and those of every stream. Must be called before any write."""
        self.response.headers.update(headers)
        await self.response.prepare(self._request)

    async def send(self, values: Iterable[Any]) -> None:
        """Send one `data:` event per value. Raises ClientStalled, ConnectionResetError."""
        await self.write(b"".join(b"data: %s\n\n" % encode(value) for value in values))

    async def write(self, data: bytes) -> None:
        """Write encoded events. Raises ClientStalled, ConnectionResetError."""
        await write_or_stall(self._request, self.response, data)

    async def close(self) -> None:
        await self.response.write_eof()
