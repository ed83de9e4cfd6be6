"""llama-server's endpoints that the embedded engine does not have, answered with 400 and what to do
instead; and those of features that it does not have switched on, answered with 403 as by llama-server."""

from __future__ import annotations

from aiohttp import web

from towerd.errors import FeatureDisabled, NotSupported

_ONE_MODEL = "this daemon serves the model that it was started with: name it with -m"
UNSUPPORTED: dict[tuple[str, str], str] = {
    ("POST", "/props"): "settings are those of the start, and of each request",
    ("POST", "/models"): _ONE_MODEL,
    ("DELETE", "/models"): _ONE_MODEL,
    ("POST", "/models/load"): _ONE_MODEL,
    ("POST", "/models/unload"): _ONE_MODEL,
    ("GET", "/models/sse"): _ONE_MODEL,
}
"""(method, path) of every route that llama-server has and the embedded engine lacks -> why, or what to do."""
DISABLED: tuple[tuple[str, str], ...] = (
    ("GET", "/tools"),
    ("POST", "/tools"),
)
"""Those of tools that run on the server, which the web UI asks for."""


async def refuse_unsupported(request: web.Request) -> web.StreamResponse:
    """Always raises NotSupported."""
    resource = request.match_info.route.resource
    assert resource is not None, "it is called for routes alone"
    why = UNSUPPORTED[(request.method, resource.canonical)]
    raise NotSupported(
        f"{request.method} {request.path} is not supported by the embedded engine; {why}"
    )


async def refuse_disabled(request: web.Request) -> web.StreamResponse:
    """Always raises FeatureDisabled."""
    raise FeatureDisabled(
        "this feature is disabled: a page's tools would run commands and change files as the daemon's user; "
        "give the page an MCP server, which runs as whoever starts it, with --ui-mcp-proxy"
    )
