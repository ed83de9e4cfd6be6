"""One HTTP/1.1 request to a llama-server, on a connection of its own.

A general client takes longer for what is not needed here (pools, cookies, redirects, name caches)
than all else that towerd does before a cached turn's first token. Here head and body leave in one
packet, and what arrives is handed on as it is. httptools (llhttp) parses it.

An idle connection would occupy one of llama-server's few HTTP threads, so none is kept.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeAlias, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict

CONNECT_S_MAX = 10.0
RESOLVED_S = 10.0
"""For so long a host name stands for the address that answered: looking it up takes a thread."""
PIECE_BYTES = 256 * 1024
"""Bodies over this go out in pieces: one write of megabytes holds the loop up."""
BUFFER_BYTES_MAX = 256 * 1024
"""Of a reply's body that nobody has read; then llama-server has to wait."""
HEAD_BYTES_MAX = 256 * 1024
_BODILESS = ("GET", "HEAD", "OPTIONS")
_PORTS = {"http": 80, "https": 443}
_CHARSET = "utf-8", "surrogateescape"

Body: TypeAlias = "bytes | bytearray | AsyncIterator[bytes] | None"


class Lost(Exception):
    """The connection ended before the reply did."""


class NotHttp(Exception):
    """What came is no HTTP reply."""


@dataclass(slots=True)
class _Address:
    """Where a URL leads."""

    host: str
    port: int
    name: str
    """Of the `Host` header."""
    prefix: str
    """Before every path."""
    tls: ssl.SSLContext | None
    """None: plain HTTP."""
    peer: str = ""
    """The address that answered last."""
    peer_until_s: float = 0.0

    async def connect(self, method: str) -> Reply:
        """A connection that a request can go out on. Raises OSError."""
        loop = asyncio.get_running_loop()
        if self.peer and loop.time() < self.peer_until_s:
            try:
                return await self._connect(self.peer, method)
            except OSError:
                self.peer = ""
        reply = await self._connect(self.host, method)
        self.peer, self.peer_until_s = reply.peer, loop.time() + RESOLVED_S
        return reply

    async def _connect(self, host: str, method: str) -> Reply:
        loop = asyncio.get_running_loop()
        name = self.host if self.tls is not None else None
        async with asyncio.timeout(CONNECT_S_MAX):
            _, reply = await loop.create_connection(
                partial(Reply, method, loop), host, self.port, ssl=self.tls, server_hostname=name
            )
        return reply


@lru_cache(8)
def _address(url: str) -> _Address:
    parts = urlsplit(url)
    assert parts.hostname is not None, "Config checks the URL"
    context = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or _PORTS[parts.scheme]
    return _Address(parts.hostname, port, parts.netloc, parts.path.rstrip("/"), context)


async def send(
    url: str, method: str, path: str, headers: Mapping[str, str], body: Body = None
) -> Reply:
    """Send a request and return when the reply's head is there; `close` the reply.

    url: of the server, with what stands before every path
    path: quoted, with its query
    headers: as they are to go out; a body that is iterated goes out in chunks unless they have a
    `Content-Length`
    Raises OSError when nothing listens there, Lost, NotHttp, and what iterating the body raises."""
    address = _address(url)
    head = _head(address, method, path, headers, body)
    reply = await address.connect(method)
    try:
        reply.begin(head, body, is_chunked=_is_chunked(headers, body))
        await reply.answered()
    except BaseException:
        reply.close()
        raise
    return reply


def _is_chunked(headers: Mapping[str, str], body: Body) -> bool:
    return isinstance(body, AsyncIterator) and "Content-Length" not in headers


def _head(
    address: _Address, method: str, path: str, headers: Mapping[str, str], body: Body
) -> bytes:
    lines = [f"{method} {address.prefix}{path} HTTP/1.1", f"Host: {address.name}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if isinstance(body, bytes | bytearray):
        lines.append(f"Content-Length: {len(body)}")
    elif _is_chunked(headers, body):
        lines.append("Transfer-Encoding: chunked")
    elif body is None and method not in _BODILESS:
        lines.append("Content-Length: 0")
    text = "\r\n".join([*lines, "Connection: close", "", ""])
    n_breaks = len(lines) + 2
    if text.count("\n") != n_breaks or text.count("\r") != n_breaks or "\0" in text:
        raise ValueError("a header holds a line break")
    return text.encode(*_CHARSET)


class Reply(asyncio.Protocol):
    """What llama-server answers to one request. One task may wait for it at a time."""

    def __init__(self, method: str, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.reason = ""
        self.headers = CIMultiDict[str]()
        self._method = method
        self._loop = loop
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        """While the connection takes no more for now."""
        self._upload: asyncio.Task[None] | None = None
        self._n_head = 0
        self._has_head = False
        self._is_complete = False
        self._is_lost = False
        self._is_paused = False
        self._is_between_chunks = False
        self._error: Lost | NotHttp | None = None

    @property
    def peer(self) -> str:
        """The address of the other end; empty if it is gone already."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(name[0]) if name else ""

    # --- for whoever asked ----------------------------------------------------------------

    @property
    def content_type(self) -> str:
        """Without its parameters."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def closed(self) -> bool:
        """Whether nothing more can come."""
        return self._is_complete or self._is_lost or self._error is not None

    def begin(self, head: bytes, body: Body, *, is_chunked: bool) -> None:
        """Send the request: a small body with its head, others beside the reply."""
        assert self._transport is not None
        if body is None:
            self._transport.write(head)
        elif isinstance(body, bytes | bytearray) and len(body) <= PIECE_BYTES:
            self._transport.writelines((head, body))
        else:
            pieces = _pieces(body) if isinstance(body, bytes | bytearray) else body
            self._transport.write(head)
            self._upload = self._loop.create_task(self._send(pieces, is_chunked))
            self._upload.add_done_callback(self._sent)

    async def answered(self) -> None:
        """Wait for the reply's head. Raises Lost, NotHttp and what iterating the body raised."""
        while not self._has_head:
            if self._upload is not None and self._upload.done():
                self._upload.result()
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self, bytes_max: int) -> bytes:
        """What has arrived of the body, at least one byte; none at its end. Raises Lost, NotHttp."""
        buffer = self._buffer
        while not buffer:
            if self._is_complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        if len(buffer) <= bytes_max:
            data = bytes(buffer)
            buffer.clear()
        else:
            data = bytes(buffer[:bytes_max])
            del buffer[:bytes_max]
        if self._is_paused and not self.closed and len(buffer) < BUFFER_BYTES_MAX:
            assert self._transport is not None
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def read_all(self) -> bytes:
        """The whole body. Raises Lost, NotHttp."""
        pieces = []
        while piece := await self.read(BUFFER_BYTES_MAX):
            pieces.append(piece)
        return b"".join(pieces)

    def lend(self) -> bool:
        """Stop reading: someone else may read whole chunks until `take_back`. False where that
        cannot be: only between two chunks, with nothing left to `read`."""
        if self._transport is None or self.closed or self._buffer or not self._is_between_chunks:
            return False
        self._transport.pause_reading()
        return True

    def own_descriptor(self) -> int | None:
        """See `own_descriptor`."""
        return own_descriptor(self._transport) if self._transport is not None else None

    def take_back(self, rest: bytes) -> None:
        """Go on reading, with what was read of a chunk that nobody took first."""
        if rest:
            self.data_received(rest)
        if not self.closed and not self._is_paused:
            assert self._transport is not None
            self._transport.resume_reading()

    def close(self) -> None:
        """Nobody wants the rest."""
        if self._upload is not None:
            self._upload.cancel()
        if not self._is_complete:
            self._fail(Lost("closed"))
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        assert self._waiter is None, "one task at a time"
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- the request's body ---------------------------------------------------------------

    async def _send(self, pieces: AsyncIterator[bytes], is_chunked: bool) -> None:
        """Write as the connection takes it; one that ended wants no more."""
        assert self._transport is not None
        async for piece in pieces:
            if self.closed:
                return
            if piece:
                self._transport.write(_chunk(piece) if is_chunked else piece)
            if self._writable is not None:
                await self._writable
        if is_chunked and not self.closed:
            self._transport.write(b"0\r\n\r\n")

    def _sent(self, upload: asyncio.Task[None]) -> None:
        """A request whose body broke off cannot be answered."""
        if upload.cancelled() or upload.exception() is not None:
            self.close()
        self._wake()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # --- the connection -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return  # what follows a complete reply is nobody's
        if not self._has_head:
            self._n_head += len(data)
            if self._n_head > HEAD_BYTES_MAX:
                self._fail(NotHttp("the reply's head does not end"))
                return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if not self._is_complete:
                self._fail(NotHttp(str(error)))
        self._is_between_chunks &= data.endswith(b"\r\n")  # nothing of the next one's size
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        is_orderly = error is None and self._error is None
        if is_orderly and self._has_head and self._ends_with_connection():
            self._is_complete = True
        if not self._is_complete:
            self._fail(Lost("the connection ended"))
        self.resume_writing()
        self._wake()

    def _ends_with_connection(self) -> bool:
        return "Content-Length" not in self.headers and "Transfer-Encoding" not in self.headers

    def _fail(self, error: Lost | NotHttp) -> None:
        self._error = self._error or error
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    # --- what the parser finds ------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._has_head:
            self.reason = ""
            self.headers.clear()

    def on_status(self, status: bytes) -> None:
        if not self._has_head:
            self.reason += status.decode(*_CHARSET)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # those after a chunked body are not passed on
            self.headers.add(name.decode(*_CHARSET), value.decode(*_CHARSET))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._has_head or 100 <= status < 200:
            return  # nobody's, or the reply proper is to come
        self.status, self._has_head = status, True
        if self._method == "HEAD":
            self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        if self._is_complete:
            return
        self._buffer += body
        if len(self._buffer) >= BUFFER_BYTES_MAX and not self._is_paused:
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()

    def on_chunk_header(self) -> None:
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        self._is_between_chunks = True

    def on_message_complete(self) -> None:
        if self._has_head and not self._is_complete:
            self._is_complete = True
            assert self._transport is not None
            self._transport.close()


def own_descriptor(transport: asyncio.BaseTransport) -> int | None:
    """A second descriptor, to be closed, of a plain connection; None if what passes on it is
    encrypted, or it is closing."""
    socket = transport.get_extra_info("socket")
    if socket is None or transport.is_closing() or transport.get_extra_info("sslcontext"):
        return None
    return os.dup(socket.fileno())


async def _pieces(body: bytes | bytearray) -> AsyncIterator[bytes]:
    view = memoryview(body)
    for start in range(0, len(body), PIECE_BYTES):
        yield bytes(view[start : start + PIECE_BYTES])
        await asyncio.sleep(0)


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)
