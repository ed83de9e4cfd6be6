"""llama-server's endpoints that the embedded engine does not support, answered with 400, and those
that stand for features which it does not have switched on, answered with 403 as by llama-server."""

from __future__ import annotations

from aiohttp import web

from towerd.errors import FeatureDisabled, NotSupported

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
)
"""(method, path) of every route that llama-server has and the embedded engine lacks."""
DISABLED: tuple[tuple[str, str], ...] = (
    ("GET", "/tools"),
    ("POST", "/tools"),
    ("GET", "/cors-proxy"),
    ("POST", "/cors-proxy"),
)
"""Those of tools that run on the server, and of its proxy, which the web UI asks for."""


async def refuse_unsupported(request: web.Request) -> web.StreamResponse:
    """Always raises NotSupported."""
    raise NotSupported(
        f"{request.method} {request.path} is not supported by the embedded engine; "
        "the llama-server engine supports it"
    )


async def refuse_disabled(request: web.Request) -> web.StreamResponse:
    """Always raises FeatureDisabled."""
    raise FeatureDisabled("this feature is disabled: towerd runs no tools and fetches no pages")
