"""How many bytes of request bodies are held at once.

A body is held from its first byte until it is parsed. Bodies of all clients together take no more
than a few of the largest allowed: many at once would exhaust the memory of a small machine.
"""

from __future__ import annotations

from aiohttp import web

from towerd.errors import Unavailable

LARGEST_AT_ONCE = 4
"""The room for all bodies, in bodies of the largest size."""


class Bodies:
    """The bytes of all bodies that are held. Event loop only."""

    def __init__(self, request_bytes_max: int) -> None:
        self.bytes_max = LARGEST_AT_ONCE * request_bytes_max
        self.n_bytes = 0


class HeldBody:
    """The bytes of one body, which count among `Bodies`."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._n_bytes = 0

    def add(self, n_bytes: int) -> None:
        """Count more bytes. Raises Unavailable if there is no room."""
        bodies = self._bodies
        if bodies.n_bytes + n_bytes > bodies.bytes_max:
            raise Unavailable(
                "The bodies of other requests take all the memory that there is for them; try again"
            )
        bodies.n_bytes += n_bytes
        self._n_bytes += n_bytes

    def release(self) -> None:
        """The body is not held any more."""
        self._bodies.n_bytes -= self._n_bytes
        self._n_bytes = 0


BODIES = web.AppKey("bodies", Bodies)
HELD = web.RequestKey("held", HeldBody)


def hold_body(request: web.Request) -> HeldBody:
    """The count of the request's body; see `release_body`."""
    held = request[HELD] = HeldBody(request.app[BODIES])
    return held


def release_body(request: web.Request) -> None:
    """The request's body is not held any more, if it was; called at the end of every request."""
    if (held := request.get(HELD)) is not None:
        held.release()
