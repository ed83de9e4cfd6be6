"""Reading a request's body, with bounds on its size, on stalls, on time on the loop and on memory.

A body is held from its first byte until it is parsed. Bodies of all clients together take no more
than a few of the largest allowed: many at once would exhaust the memory of a small machine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from towerd.api.http.connection import let_send
from towerd.api.http.content_coding import coding_of, unpack
from towerd.api.http.fields import json_type
from towerd.api.http.keys import CONFIG, LIMITS
from towerd.api.http.limits import Limits
from towerd.api.http.reply import RequestTimeout, reason_of
from towerd.api.http.room import bytes_to_parse, wait_for_room
from towerd.errors import InvalidRequest, RequestTooBig, TooLarge, Unavailable
from towerd.system.process import return_free_memory
from towerd.system.ram_limit import RamLimit

LARGEST_AT_ONCE = 4
"""The room for all bodies, in bodies of the largest size."""
ROOM_SHARE = 4
"""Where RAM is limited, bodies take at most one in so many parts of what is left beside the model."""
SMALL_REPLY_BYTES = 1 << 20
"""What smaller replies take is not counted."""
_MARK = b"\xef\xbb\xbf"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Bodies:
    """The bytes of all bodies that are held. Event loop only."""

    def __init__(
        self, request_bytes_max: int, ram: RamLimit | None = None, *, parses: bool = True
    ) -> None:
        """ram: what parsing them keeps to, too; None: no limit. parses: whether they are; else they are passed on"""
        self.ram = ram or RamLimit(address_max=0)
        self.n_bytes = 0
        self._parses = parses
        self._bytes_max = LARGEST_AT_ONCE * request_bytes_max
        self._writing = asyncio.Lock()

    @property
    def bytes_max(self) -> int:
        """What they may take together."""
        return min(self._bytes_max, self.ram.room // ROOM_SHARE)

    async def claim(self, request: web.Request, n_bytes: int) -> None:
        """Claim RAM for parsing a request's body, until `release_body`. Raises RamLimitReached, RequestTooBig."""
        await self._claim(request, n_bytes, "Reading this request takes")

    async def claim_reply(self, request: web.Request, n_bytes: int, written: int) -> None:
        """Claim RAM for what is replied, until the request's end. written: bytes that it takes besides while it is written,
        in place of those that were claimed before. Without a limit nothing is claimed. Raises RamLimitReached, RequestTooBig."""
        if not self.ram.is_limited or n_bytes + written <= SMALL_REPLY_BYTES:
            return
        await self._claim(request, n_bytes, "Replying to this request may take", written)
        before, request[WRITTEN] = request.get(WRITTEN, 0), written
        self.ram.release(0, before)

    def reply_arrived(self, request: web.Request, n_bytes: int) -> None:
        """So much of what was claimed for a reply is there now, and is seen."""
        n_bytes = min(n_bytes, request.get(CLAIMED, 0))
        if n_bytes:
            self.ram.release(n_bytes)
            request[CLAIMED] -= n_bytes

    @asynccontextmanager
    async def writing_reply(self, request: web.Request) -> AsyncIterator[None]:
        """Write what was claimed for: one request does at a time, since only the most that any of them takes counts."""
        if not request.get(WRITTEN):
            yield
            return
        async with self._writing:
            yield
            await asyncio.to_thread(return_free_memory)

    def reply_written(self, request: web.Request) -> None:
        """All of it is written."""
        self.ram.release(0, request.get(WRITTEN, 0))
        request[WRITTEN] = 0

    async def _claim(self, request: web.Request, n_bytes: int, what: str, in_turn: int = 0) -> None:
        await wait_for_room(self.ram, n_bytes, in_turn, claim=True, what=what)
        request[CLAIMED] = request.get(CLAIMED, 0) + n_bytes

    def needed(self, data: bytes, taken: Callable[[bytes, int], int] = bytes_to_parse) -> int:
        """RAM that is to be claimed for a body that is there. taken: by what is done with it, as `bytes_to_parse`"""
        return taken(data, self.ram.room) if self._parses else len(data)

    def check(self, n_bytes: int) -> None:
        """Raises RequestTooBig for a body that there is never room for."""
        if self.ram.is_limited and n_bytes > self.bytes_max:
            self.ram.n_refused += 1
            raise RequestTooBig(
                f"A request may have {self.bytes_max >> 20} MiB within {self.ram.text}: send less at once"
            )

    def hold(self, request: web.Request, n_bytes: int) -> None:
        """Count more bytes of a request's body. Raises Unavailable if there is no room, RequestTooBig if there never
        is."""
        self.check(request.get(HELD, 0) + n_bytes)
        if self.n_bytes + n_bytes > self.bytes_max:
            raise Unavailable(
                "The bodies of other requests take all the memory reserved for them; try again"
            )
        self.n_bytes += n_bytes
        request[HELD] = request.get(HELD, 0) + n_bytes


BODIES = web.AppKey("bodies", Bodies)
HELD = web.RequestKey("held", int)
"""How many bytes of the request's body are held."""
CLAIMED = web.RequestKey("claimed", int)
"""How many bytes of RAM parsing it, or the reply, may yet take."""
WRITTEN = web.RequestKey("written", int)
"""How many bytes of RAM the reply takes besides while it is written, if that was claimed."""


def release_body(request: web.Request) -> None:
    """The request's body is not held any more, if it was; called at the end of every request."""
    if n_bytes := request.get(HELD):
        request.app[BODIES].n_bytes -= n_bytes
        request[HELD] = 0
    if n_claimed := request.get(CLAIMED):
        request.app[BODIES].ram.release(n_claimed)
        request[CLAIMED] = 0
    if request.get(WRITTEN):
        request.app[BODIES].reply_written(request)


async def read_object(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object; an empty body is an empty object.

    Raises InvalidRequest (not JSON, not an object), TooLarge, RequestTimeout."""
    return await decode_object(request, await read_bytes(request))


async def decode_object(request: web.Request, data: bytes) -> dict[str, Any]:
    """A body that was read, as `read_object`. Raises InvalidRequest."""
    if not data:
        return {}
    value = await decode(request, data)
    if not isinstance(value, dict):
        raise InvalidRequest(f"The request body must be a JSON object, but is {json_type(value)}")
    return value


async def decode(request: web.Request, data: bytes) -> Any:
    """The JSON value of a body, decoded off the loop if it is big. Raises InvalidRequest if it is
    not valid or exceeds one of the `Limits`."""
    limits = request.app[LIMITS]
    if len(data) <= limits.inline_bytes_max:
        return _decode(data, limits)
    return await asyncio.to_thread(_decode, data, limits)


def check_values(data: bytes, limits: Limits) -> None:
    """Raises InvalidRequest if a body has so many values that decoding it would block the others."""
    if data.count(b",") > limits.values_max:
        raise InvalidRequest(f"The request body has more than {limits.values_max} values")


def _decode(data: bytes, limits: Limits) -> Any:
    check_values(data, limits)
    try:
        value = decode_json(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}") from error
    limits.check(value)
    return value


def decode_json(data: bytes, type: Any = Any) -> Any:
    """The value of a text that is nearly JSON, as clients send it: see `towerd.wire.mended_json`. Raises
    as msgspec's decoder."""
    try:
        return msgspec.json.decode(data, type=type)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if not may_be_mended(data):
            raise
    from towerd.wire import mended_json  # llama.cpp's libraries are loaded for that

    return msgspec.json.decode(mended_json(data), type=type)


def may_be_mended(data: bytes) -> bool:
    """Whether a text may begin with a byte-order mark or hold half of a surrogate pair."""
    return data.startswith(_MARK) or _SURROGATE.search(data) is not None


PEEKED = web.RequestKey("peeked", bytes)


async def peek_bytes(request: web.Request) -> bytes:
    """The whole body, for `read_bytes` to return once more. Raises as that does."""
    data = request[PEEKED] = await read_bytes(request)
    return data


async def read_bytes(
    request: web.Request, taken: Callable[[bytes, int], int] = bytes_to_parse
) -> bytes:
    """The whole body, which counts among the `Bodies` until `release_body`, or the end of the
    request. taken: see `Bodies.needed`. Raises what `iter_bytes` does, and Unavailable if other bodies take all the room."""
    if PEEKED in request:
        peeked = request[PEEKED]
        del request[PEEKED]
        return peeked
    data = BytesIO()
    bodies = request.app[BODIES]
    bodies.check(request.content_length or 0)
    await wait_for_room(bodies.ram, 0, claim=False)
    async for chunk in iter_bytes(request):
        bodies.hold(request, len(chunk))
        data.write(chunk)
    whole = data.getvalue()  # not a copy: copying 64 MiB would block the loop for 50 ms
    if bodies.ram.is_limited:
        await bodies.claim(request, bodies.needed(whole, taken))
    return whole


def iter_bytes(request: web.Request) -> AsyncIterator[bytes]:
    """The body as it arrives, unpacked, up to `request_bytes_max`.

    A body whose Content-Length is too large, or that is compressed in an unknown way, is refused
    before any of it is read. Raises InvalidRequest, TooLarge, RequestTimeout."""
    bytes_max = request.app[CONFIG].request_bytes_max
    too_large = TooLarge(f"The request body exceeds the limit of {bytes_max} bytes")
    if (request.content_length or 0) > bytes_max:
        raise too_large
    coding = coding_of(request.headers.get(hdrs.CONTENT_ENCODING, ""))
    chunks = _bounded(_chunks(request), bytes_max, too_large)
    return _bounded(unpack(coding, chunks), bytes_max, too_large) if coding else chunks


async def _bounded(
    chunks: AsyncIterator[bytes], bytes_max: int, too_large: TooLarge
) -> AsyncIterator[bytes]:
    n = 0
    async for chunk in chunks:
        n += len(chunk)
        if n > bytes_max:
            raise too_large
        yield chunk


async def _chunks(request: web.Request) -> AsyncIterator[bytes]:
    await let_send(request)
    try:
        while True:
            async with asyncio.timeout(request.app[LIMITS].read_stall_s):
                chunk = await request.content.readany()
            if not chunk:
                return
            yield chunk
    except TimeoutError:
        raise RequestTimeout("The request body stopped arriving") from None
    except web.RequestPayloadError as error:
        cause = error.__cause__
        reason = reason_of(cause) if isinstance(cause, HttpProcessingError) else error
        raise InvalidRequest(f"The request body cannot be read: {reason}") from error
