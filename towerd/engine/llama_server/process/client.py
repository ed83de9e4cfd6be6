"""HTTP requests to a llama-server or to a model's process, through one aiohttp session.

Nothing is added to a request but what HTTP needs: headers go out as they are given, paths are
neither decoded nor quoted again, and bodies of replies are handed on as they arrive, packed or not.
An idle connection would occupy one of llama-server's few HTTP threads, so none to it is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TypeAlias
from weakref import WeakSet

from aiohttp import (
    BaseConnector,
    ClientConnectionError,
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientResponseError,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    DummyCookieJar,
    TCPConnector,
    UnixConnector,
    hdrs,
)
from multidict import CIMultiDict
from yarl import URL

from towerd.errors import TowerdError

LOST = "llama-server ended while it answered; try again"
"""What clients hear of a reply that broke off."""
CONNECT_S_MAX = 10.0
PIECE_BYTES = 256 * 1024
"""Bodies over this go out in pieces: one write of megabytes blocks the loop."""
READ_BYTES_MAX = 256 * 1024
HEAD_BYTES_MAX = 256 * 1024
"""Of a reply's status line, and of each of its headers."""
_ADDED = (hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE, hdrs.USER_AGENT)
"""Headers that aiohttp would add."""

Body: TypeAlias = "bytes | bytearray | AsyncIterator[bytes] | None"


class ClientFailure(Exception):
    """There is no reply."""


class Unreachable(ClientFailure):
    """Nothing listens at the address."""


class Lost(ClientFailure):
    """The connection ended before the reply did."""


class NotHttp(ClientFailure):
    """The reply is not HTTP."""


class Client:
    """Requests to one server, until it is closed."""

    def __init__(self, url: str, socket: Path | None = None) -> None:
        """url: what stands before every path. socket: the Unix socket of the server; None: it is where
        the URL says."""
        self.url = url.rstrip("/")
        self._socket = socket
        self._session: ClientSession | None = None
        """Made by the first request: it belongs to an event loop."""
        self._is_closed = False
        self.n_waiting = 0
        """Requests that wait for the head of their reply."""
        self._replies: WeakSet[ClientResponse] = WeakSet()

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: Body = None
    ) -> ClientResponse:
        """Send a request and return when the reply's head is there; `close` the reply.

        path: quoted, with its query
        headers: sent as UTF-8, without the bytes of a value that are not UTF-8
        body: one that is iterated goes out in chunks unless `headers` have a `Content-Length`
        Raises Unreachable, Lost, NotHttp, and the TowerdError that iterating the body raises."""
        if self._is_closed:
            raise Unreachable("towerd is leaving")
        if isinstance(body, bytes | bytearray) and len(body) > PIECE_BYTES:
            headers = CIMultiDict(headers)
            headers[hdrs.CONTENT_LENGTH] = str(len(body))
            body = _pieces(body)
        session = self._session = self._session or _open_session(self._socket)
        target = URL(self.url + path, encoded=True)
        self.n_waiting += 1
        try:
            reply = await session.request(
                method, target, headers=headers, data=body, allow_redirects=False
            )
        except (ClientConnectorError, ConnectionTimeoutError) as error:
            raise Unreachable(str(error)) from error
        except ClientResponseError as error:
            raise NotHttp(error.message) from error
        except (ClientError, OSError) as error:
            if isinstance(error.__cause__, TowerdError):
                raise error.__cause__ from None
            raise Lost(str(error)) from error
        finally:
            self.n_waiting -= 1
        if reply.status < 200:
            reply.close()
            raise NotHttp("it switches to another protocol")
        self._replies.add(reply)
        return reply

    async def drop(self) -> None:
        """End all requests: their replies are lost. Later ones are sent as before."""
        session, self._session = self._session, None
        for reply in self._replies:  # closing the session would leave their readers waiting
            if not reply.content.is_eof():
                reply.content.set_exception(ClientConnectionError("the reply was given up"))
        self._replies.clear()
        if session is not None:
            await session.close()

    async def aclose(self) -> None:
        """Close the session; replies that are still being read are lost."""
        self._is_closed = True
        await self.drop()


def _open_session(socket: Path | None) -> ClientSession:
    connector: BaseConnector = TCPConnector(limit=0, force_close=True)
    if socket is not None:
        connector = UnixConnector(str(socket), limit=0)
    return ClientSession(
        connector=connector,
        cookie_jar=DummyCookieJar(),
        skip_auto_headers=_ADDED,
        auto_decompress=False,
        timeout=ClientTimeout(total=None, connect=CONNECT_S_MAX),
        max_line_size=HEAD_BYTES_MAX,
        max_field_size=HEAD_BYTES_MAX,
    )


async def read(reply: ClientResponse, bytes_max: int) -> bytes:
    """What has arrived of a reply's body, at least one byte; none at its end. Raises Lost, after
    all that came before was read."""
    content = reply.content
    try:
        return await content.read(bytes_max)
    except (ClientError, OSError) as error:
        if rest := content._read_nowait(bytes_max):  # aiohttp would not return it
            return rest
        raise Lost(str(error)) from error


async def read_all(reply: ClientResponse) -> bytes:
    """The whole body. Raises Lost."""
    pieces = []
    while piece := await read(reply, READ_BYTES_MAX):
        pieces.append(piece)
    return b"".join(pieces)


async def _pieces(body: bytes | bytearray) -> AsyncIterator[bytes]:
    view = memoryview(body)
    for start in range(0, len(body), PIECE_BYTES):
        yield bytes(view[start : start + PIECE_BYTES])
        await asyncio.sleep(0)
