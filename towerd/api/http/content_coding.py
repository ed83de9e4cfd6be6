"""Compressed request bodies (`Content-Encoding`), unpacked piece by piece in worker threads.

Nothing is unpacked before a handler asks for the body: a hundred kilobytes may become hundreds of
megabytes, so the key, the path and the length come first. Nobody unpacks more than is read.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator

from towerd.errors import InvalidRequest

CODINGS = ("gzip", "deflate")
PIECE_BYTES = 256 * 1024
"""Unpacked in one step of a worker thread, which takes about a millisecond."""
_ALIASES = {"x-gzip": "gzip", "identity": "", "": ""}
_GZIP_BITS = 16 + zlib.MAX_WBITS
_ZLIB_METHOD = 8
"""In the low bits of the first byte of `deflate` with zlib's header, which some clients leave out."""


class UnsupportedCoding(InvalidRequest):
    """The body is compressed in a way that is not read here (415)."""

    status = 415


def coding_of(header: str) -> str:
    """One of `CODINGS`, or nothing for a body that is as it is. Raises UnsupportedCoding."""
    name = header.strip().lower()
    name = _ALIASES.get(name, name)
    if name and name not in CODINGS:
        raise UnsupportedCoding(
            f"Content-Encoding {ascii(name[:40])} is not supported; send {' or '.join(CODINGS)}, or "
            "the body as it is"
        )
    return name


async def unpack(coding: str, packed: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The bytes that `packed` stands for, in pieces of at most `PIECE_BYTES`. Raises InvalidRequest
    if they are damaged or cut off, and what `packed` raises."""
    unpacker = _Unpacker(coding)
    async for data in packed:
        unpacker.add(data)
        while piece := await asyncio.to_thread(unpacker.next):
            yield piece
    if not unpacker.is_whole:
        raise InvalidRequest(f"The request body cannot be read: its {coding} data is cut off")


class _Unpacker:
    """Unpacks one body, in one thread at a time."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._stream = zlib.decompressobj(_GZIP_BITS)
        self._has_begun = False
        self._data = b""

    def add(self, data: bytes) -> None:
        """Take more packed bytes, at least one. All that came before must have been unpacked."""
        if not self._has_begun and self._coding == "deflate":
            has_header = data[0] & 0xF == _ZLIB_METHOD
            self._stream = zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
        self._has_begun = True
        self._data = data

    @property
    def is_whole(self) -> bool:
        """Whether the body may end here."""
        return self._stream.eof or not self._has_begun

    def next(self) -> bytes:
        """At most `PIECE_BYTES`; nothing if it takes more packed bytes. Raises InvalidRequest."""
        while True:
            stream = self._stream
            try:
                piece = stream.decompress(self._data, PIECE_BYTES)
            except zlib.error as error:
                raise InvalidRequest(
                    f"The request body cannot be read: it is not {self._coding} data ({error})"
                ) from None
            self._data = stream.unconsumed_tail
            if stream.eof and stream.unused_data:
                self._begin_member(stream.unused_data)
            if piece or not self._data:
                return piece

    def _begin_member(self, data: bytes) -> None:
        """gzip may consist of several members. Raises InvalidRequest for other data behind the end."""
        if self._coding != "gzip":
            raise InvalidRequest("The request body cannot be read: there is data after its end")
        self._stream, self._data = zlib.decompressobj(_GZIP_BITS), data
