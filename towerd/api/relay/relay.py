"""Passes the reply of another process on to a client as it arrives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from aiohttp import ClientResponse, web

from towerd.api.http.reply import error_event
from towerd.api.http.sse import write_or_stall
from towerd.api.http.translation import NDJSON, Translation
from towerd.engine.llama_server.process import client
from towerd.engine.llama_server.process.client import Lost
from towerd.errors import TowerdError

EVENT_STREAM = "text/event-stream"
COPY_BYTES_MAX = 256 * 1024
"""Bytes of a reply that are copied in one step of the event loop."""
LINE_BYTES_MAX = 1 << 20
"""A line that is longer is passed on as it arrives."""
_BLANK_LINE_BYTES = 3
_SLOT = re.compile(rb'(?<=[{,])"id_slot":(-?\d+)')
_SLOT_BYTES_MAX = 32


class SlotHider:
    """Replaces each `id_slot` of a reply that arrives in parts by 0, in as many bytes, so that the
    reply's length stays."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """What can be sent of the bytes so far: all but an end that may be half an `id_slot`."""
        data = self._held + chunk
        cut = len(data)
        if not data.endswith(b"\n"):  # at the end of an event there is nothing to wait for
            start = max(data.rfind(b","), data.rfind(b"{"))
            cut = start if 0 <= start and cut - start <= _SLOT_BYTES_MAX else cut
        self._held = data[cut:]
        return _SLOT.sub(_zero, data[:cut])

    def rest(self) -> bytes:
        """The end of the reply."""
        held, self._held = self._held, b""
        return _SLOT.sub(_zero, held)


def _zero(found: re.Match[bytes]) -> bytes:
    return b'"id_slot":' + b"0".rjust(len(found[1]))


class LineEnds:
    """Holds the begun line of a stream back until all of it is there: if that never comes, an error can
    follow that clients can read."""

    def __init__(self) -> None:
        self.is_within_event = False
        """Whether what was sent ends within an event."""
        self._held = self._sent = b""

    def feed(self, chunk: bytes) -> bytes:
        """What can be sent of the bytes so far."""
        if not chunk:
            return b""
        data = self._held + chunk
        cut = data.rfind(b"\n") + 1
        if len(data) - cut > LINE_BYTES_MAX:
            cut = len(data)
        self._held, passed = data[cut:], data[:cut]
        if passed:
            self._sent = (self._sent + passed[-_BLANK_LINE_BYTES:])[-_BLANK_LINE_BYTES:]
            self.is_within_event = not self._sent.endswith((b"\n\n", b"\n\r\n"))
        return passed

    def rest(self) -> bytes:
        """The last line, which has no end."""
        held, self._held = self._held, b""
        return held


async def relay(
    request: web.Request,
    reply: ClientResponse,
    response: web.StreamResponse,
    on_lost: Callable[[], TowerdError],
    through: SlotHider | Translation | None = None,
) -> web.StreamResponse:
    """Write the body of `reply` as that of `response`, whose head is sent here if it was not.

    through: what the body passes through. on_lost: called if the process ended before the reply did; the error is
    told to the client."""
    if not response.prepared:
        await response.prepare(request)
    ends = LineEnds() if response.content_type in (EVENT_STREAM, NDJSON) else None
    try:
        while chunk := await read(reply):
            passed = through.feed(chunk) if through else chunk
            await write_or_stall(request, response, ends.feed(passed) if ends else passed)
        rest = through.rest() if through else b""
        if ends is not None:
            rest = ends.feed(rest) + ends.rest()
        await write_or_stall(request, response, rest)
    except Lost:
        if ends is not None and ends.is_within_event and response.content_type == EVENT_STREAM:
            await write_or_stall(request, response, b"\n\n")
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
    """Tell a client that its reply is incomplete: by an event or a line if it reads such, else by aborting
    its connection. Raises ConnectionResetError."""
    if response.content_type not in (EVENT_STREAM, NDJSON):
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(error.message) from error
    await write_or_stall(request, response, error_event(request.path, error))
