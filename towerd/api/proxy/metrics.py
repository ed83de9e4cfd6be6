"""GET /metrics in front of a llama-server: its own figures as it gives them, then towerd's."""

from __future__ import annotations

import asyncio

from aiohttp import web

from towerd.api.llama import info
from towerd.api.proxy.forward import body_of
from towerd.api.proxy.link import LINK, sidecar_of
from towerd.errors import TowerdError

_THEIRS = b"llamacpp:"
_PREFIXES = (_THEIRS, b"# HELP " + _THEIRS, b"# TYPE " + _THEIRS)


async def get_metrics(request: web.Request) -> web.Response:
    """Prometheus text. A llama-server without --metrics leaves towerd's own count of its names.

    Raises SwitchedOff."""
    reply = await info.get_metrics(request)
    theirs = await _ask(request)
    own = reply.body
    if theirs and isinstance(own, bytes):
        reply.body = await asyncio.to_thread(merged, theirs, own)
    return reply


def merged(theirs: bytes, own: bytes) -> bytes:
    """`theirs`, then of `own` what does not have llama-server's names."""
    lines = [line for line in own.splitlines(keepends=True) if not line.startswith(_PREFIXES)]
    return theirs.rstrip(b"\n") + b"\n" + b"".join(lines)


async def _ask(request: web.Request) -> bytes:
    """llama-server's own text; empty if there is none."""
    engine = sidecar_of(request)
    try:
        reply = await request.app[LINK].request(engine, "GET", "/metrics", engine.upstream.auth())
        try:
            return engine.without_own(await body_of(reply)) if reply.status == 200 else b""
        finally:
            reply.close()
    except TowerdError:
        return b""
