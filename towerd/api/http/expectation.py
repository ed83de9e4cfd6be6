"""`Expect: 100-continue`: a client that asks before it sends its body gets the word when a handler
reads the body, so that one that is refused sends nothing. aiohttp would give it before anything else."""

from __future__ import annotations

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11, RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
WAITS = web.RequestKey("waits", bool)
"""Whether the client waits for this word."""


def is_expecting(message: RawRequestMessage) -> bool:
    """Whether a request's head asks for it. Other expectations are aiohttp's to refuse."""
    return message.headers.get(hdrs.EXPECT, "").lower() == "100-continue"


def without_expectation(message: RawRequestMessage) -> RawRequestMessage:
    """The head as aiohttp takes it, which otherwise answers at once."""
    headers = CIMultiDict(message.headers)
    del headers[hdrs.EXPECT]
    return message._replace(headers=CIMultiDictProxy(headers))


async def let_send(request: web.Request) -> None:
    """Tell the client to send its body, if it waits for that."""
    if request.get(WAITS) and request.version >= HttpVersion11:
        request[WAITS] = False
        await request.writer.write(_CONTINUE)
        request.writer.output_size = 0  # a reply has not begun
