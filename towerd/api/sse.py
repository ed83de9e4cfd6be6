"""Server-sent events to a client that may stop reading."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from towerd.api.keys import LIMITS
from towerd.api.reply import encode


class ClientStalled(ConnectionError):
    """The client took nothing for `write_stall_s`; its connection is gone."""


class EventStream:
    """A `text/event-stream` response. Writing waits for the client, but not for ever."""

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self._stall_s = request.app[LIMITS].write_stall_s
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )

    async def prepare(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, values: Iterable[Any]) -> None:
        """One `data:` event per value. Raises ClientStalled, ConnectionResetError."""
        await self._write(b"".join(b"data: %s\n\n" % encode(value) for value in values))

    async def done(self) -> None:
        """OpenAI's end mark."""
        await self._write(b"data: [DONE]\n\n")

    async def ping(self) -> None:
        """A comment that keeps impatient clients and proxies waiting."""
        await self._write(b":\n\n")

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        try:
            async with asyncio.timeout(self._stall_s):
                await self.response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientStalled("the client stopped reading") from None

    async def close(self) -> None:
        await self.response.write_eof()
