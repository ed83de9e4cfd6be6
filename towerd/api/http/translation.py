"""Translation: a reply of one of our routes, in the shape of another API, on its way to the client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from towerd.api.http.off_loop import by_size
from towerd.api.http.reply import encode, raw_reply

NDJSON = "application/x-ndjson"
_DATA = b"data: {"
_ITEM_BYTES = 16
"""A value of a reply has at least so many bytes, or is a number, which is decoded faster than others."""


class Translation(ABC):
    """Translates one reply: events of a stream into lines of JSON as they arrive, or a whole body."""

    def __init__(self, path: str) -> None:
        """path: the route of llama-server whose reply it is."""
        self.path = path
        self._held = b""

    @abstractmethod
    def lines(self, event: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """The objects that say what an event says, one for each line."""

    @abstractmethod
    def whole(self, reply: dict[str, Any]) -> dict[str, Any]:
        """The body that says what a reply says."""

    def feed(self, data: bytes) -> bytes:
        """The lines for what has arrived of a stream. Comments are left out; lines of JSON pass."""
        *complete, self._held = (self._held + data).split(b"\n")
        return b"".join(map(self._line, complete))

    def rest(self) -> bytes:
        """The lines for the end of a stream."""
        held, self._held = self._held, b""
        return self._line(held)

    def _line(self, line: bytes) -> bytes:
        if line.startswith(_DATA):
            objects = self.lines(msgspec.json.decode(line[len(_DATA) - 1 :]))
            return b"".join(encode(each) + b"\n" for each in objects)
        return line + b"\n" if line.startswith(b"{") else b""


TRANSLATION = web.RequestKey("translation", Translation)
"""Set on a request whose reply is translated."""


async def whole_reply(request: web.Request, body: bytes) -> web.Response:
    """The reply with a whole body, translated if the request says so."""
    translation = request.get(TRANSLATION)
    if translation is None:
        return raw_reply(body)
    return raw_reply(await by_size(len(body) // _ITEM_BYTES, _translated, translation, body))


def _translated(translation: Translation, body: bytes) -> bytes:
    return encode(translation.whole(msgspec.json.decode(body)))
