"""The status page at /towerd/: three static files, no outside assets."""

from __future__ import annotations

from importlib.resources import files

from aiohttp import web

from towerd.errors import NotFound

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
_SECURITY = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


_FOLDER = files("towerd.api.admin") / "page_files"
# Read at import, before any event loop runs.
_ASSETS = {name: (_FOLDER / name).read_bytes() for name in _TYPES}


async def get_root(request: web.Request) -> web.Response:
    """Redirect the bare address to the page."""
    raise web.HTTPFound("/towerd/")


async def get_page(request: web.Request) -> web.Response:
    """The page itself."""
    return _asset("index.html")


async def get_asset(request: web.Request) -> web.Response:
    """The page's style sheet and script."""
    return _asset(request.match_info["name"])


def _asset(name: str) -> web.Response:
    data = _ASSETS.get(name)
    if data is None:
        raise NotFound("File Not Found")
    reply = web.Response(body=data, headers=_SECURITY)
    reply.headers["Content-Type"] = _TYPES[name]
    return reply
