"""The explorer at /towerd/: static files without any outside asset."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from aiohttp import web

from towerd.errors import NotFound

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_SECURITY = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


_FOLDER = files("towerd.api.admin") / "page_files"
# Read at import, before any event loop runs.
_ASSETS = {each.name: each.read_bytes() for each in _FOLDER.iterdir() if each.is_file()}


async def get_root(request: web.Request) -> web.Response:
    """Redirect the bare address to the page, which says how to get llama.cpp's chat page."""
    raise web.HTTPFound("/towerd/#/no-chat-page" if request.path == "/" else "/towerd/")


async def get_page(request: web.Request) -> web.Response:
    """The page itself."""
    return _asset("index.html")


async def get_asset(request: web.Request) -> web.Response:
    """The page's style sheet and scripts."""
    return _asset(request.match_info["name"])


def _asset(name: str) -> web.Response:
    data = _ASSETS.get(name)
    if data is None:
        raise NotFound("File Not Found")
    reply = web.Response(body=data, headers=_SECURITY)
    reply.headers["Content-Type"] = _TYPES[Path(name).suffix]
    return reply
