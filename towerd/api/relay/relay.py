"""Passes the reply of another process on to a client as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from aiohttp import ClientResponse, web

from towerd.api.http.reply import error_event
from towerd.api.http.sse import write_or_stall
from towerd.engine.llama_server.process import client
from towerd.engine.llama_server.process.client import Lost
from towerd.errors import TowerdError

EVENT_STREAM = "text/event-stream"
COPY_BYTES_MAX = 256 * 1024
"""Bytes of a reply that are copied in one step of the event loop."""


class Edit(Protocol):
    """Changes a reply that arrives in parts."""

    def feed(self, chunk: bytes) -> bytes:
        """What can be sent now."""
        ...

    def rest(self) -> bytes:
        """What is left at the end."""
        ...


async def relay(
    request: web.Request,
    reply: ClientResponse,
    response: web.StreamResponse,
    on_lost: Callable[[], TowerdError],
    edit: Edit | None = None,
) -> web.StreamResponse:
    """Write the body of `reply` as that of `response`, whose head is sent here if it was not.

    edit: changes the body on its way, not its length. on_lost: called if the process ended before the reply did; the error is told to the client."""
    if not response.prepared:
        await response.prepare(request)
    try:
        while chunk := await read(reply):
            await write_or_stall(request, response, edit.feed(chunk) if edit else chunk)
        if edit is not None:
            await write_or_stall(request, response, edit.rest())
    except Lost:
        await cut_off(request, response, on_lost())
    await response.write_eof()
    return response


async def read(reply: ClientResponse, bytes_max: int = COPY_BYTES_MAX) -> bytes:
    """The part of a reply's body that has arrived, at least one byte; empty at its end. Reads at
    most `bytes_max`, and yields to other tasks if it reads that many. Raises Lost."""
    chunk = await client.read(reply, bytes_max)
    if len(chunk) == bytes_max:
        await asyncio.sleep(0)
    return chunk


async def cut_off(request: web.Request, response: web.StreamResponse, error: TowerdError) -> None:
    """Tell a client that its reply is incomplete: by an event if it reads events, else by aborting
    its connection. Raises ConnectionResetError."""
    if response.content_type != EVENT_STREAM:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(error.message) from error
    await write_or_stall(request, response, error_event(request.path, error))
