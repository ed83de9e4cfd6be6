"""GET /metrics in front of a llama-server: its own metrics unchanged, then towerd's."""

from __future__ import annotations

import asyncio

from aiohttp import web

from towerd.api.llama import info
from towerd.api.relay import upstream
from towerd.api.relay.forward import body_of
from towerd.api.relay.upstream import llama_server_of
from towerd.errors import TowerdError

_THEIRS = b"llamacpp:"
_PREFIXES = (_THEIRS, b"# HELP " + _THEIRS, b"# TYPE " + _THEIRS)


async def get_metrics(request: web.Request) -> web.Response:
    """Prometheus text. Without --metrics at llama-server, towerd's own values of its metrics stay.

    Raises SwitchedOff."""
    reply = await info.get_metrics(request)
    theirs = await _ask(request)
    own = reply.body
    if theirs and isinstance(own, bytes):
        reply.body = await asyncio.to_thread(merged, theirs, own)
    return reply


def merged(theirs: bytes, own: bytes) -> bytes:
    """`theirs`, followed by those metrics of `own` that do not have llama-server's names."""
    lines = [line for line in own.splitlines(keepends=True) if not line.startswith(_PREFIXES)]
    return theirs.rstrip(b"\n") + b"\n" + b"".join(lines)


async def _ask(request: web.Request) -> bytes:
    """llama-server's metrics; empty if there are none."""
    engine = llama_server_of(request)
    try:
        reply = await upstream.request(engine, "GET", "/metrics", engine.upstream.auth())
        try:
            return engine.without_own(await body_of(reply)) if reply.status == 200 else b""
        finally:
            reply.close()
    except TowerdError:
        return b""
