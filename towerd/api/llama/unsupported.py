"""llama-server's endpoints that the embedded engine does not support, answered with 400."""

from __future__ import annotations

from aiohttp import web

from towerd.errors import NotSupported

UNSUPPORTED: tuple[tuple[str, str], ...] = (
    ("POST", "/props"),
    ("POST", "/slots/{id_slot}"),
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/audio/transcriptions"),
    ("POST", "/models"),
    ("DELETE", "/models"),
    ("POST", "/models/load"),
    ("POST", "/models/unload"),
    ("GET", "/models/sse"),
    ("GET", "/tools"),
    ("POST", "/tools"),
    ("GET", "/cors-proxy"),
    ("POST", "/cors-proxy"),
)
"""(method, path) of every route that llama-server has and the embedded engine lacks."""


async def refuse_unsupported(request: web.Request) -> web.StreamResponse:
    """Always raises NotSupported."""
    raise NotSupported(
        f"{request.method} {request.path} is not supported by the embedded engine; "
        "the llama-server engine supports it"
    )
