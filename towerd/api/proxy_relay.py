"""A stream's events on their way to the client, from one callback of the event loop.

Where all cores decode, whatever is computed between two tokens delays the next one, and little of
it is still in the caches. So what arrives is written at once, without waking the request's task,
unless the client is slow: then the task waits for it.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import hdrs, web

from towerd.api.sse import is_keeping_up


class Relay:
    """Writes to a prepared response; for `Reply.relay`."""

    def __init__(
        self, request: web.Request, response: web.StreamResponse, take: Callable[[bytes], bytes]
    ) -> None:
        """take: what may go out, of what arrived"""
        self._request = request
        self._take = take
        self._is_chunked = response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"

    def pass_on(self, data: bytes) -> bool:
        """Take `data` and write what may go out; False: the task is to do it."""
        transport = self._request.transport
        if transport is None or transport.is_closing() or not is_keeping_up(transport, data):
            return False
        if ready := self._take(data):
            transport.write(b"%x\r\n%b\r\n" % (len(ready), ready) if self._is_chunked else ready)
        return True
