"""Pages for browsers, static files without any outside asset: the explorer at /towerd/, and llama.cpp's own
web UI at /, from the files that `make ui` builds and wheels carry."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from aiohttp import web

from towerd.api.http.keys import UI
from towerd.errors import NotFound

INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}

# ---- the explorer -------------------------------------------------------------------------------

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_FOLDER = files("towerd.api.admin") / "page_files"
# Read at import, before any event loop runs.
_ASSETS = {each.name: each.read_bytes() for each in _FOLDER.iterdir() if each.is_file()}


async def get_explorer(request: web.Request) -> web.Response:
    """The explorer."""
    return _asset(INDEX)


async def get_asset(request: web.Request) -> web.Response:
    """Its style sheet and scripts."""
    return _asset(request.match_info["name"])


async def redirect(request: web.Request) -> web.Response:
    """From the address without its last slash."""
    raise web.HTTPFound("/towerd/")


def _asset(name: str) -> web.Response:
    data = _ASSETS.get(name)
    if data is None:
        raise NotFound("File Not Found")
    headers = _HEADERS | {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
    reply = web.Response(body=data, headers=headers)
    reply.headers["Content-Type"] = _TYPES[Path(name).suffix]
    return reply


# ---- llama.cpp's web UI -------------------------------------------------------------------------

_ISOLATED = {
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""As llama-server sends them with the page: its interpreter of Python needs them."""
_HASHED = "_app/immutable/"
"""Files whose content never changes under their name."""


def built_ui() -> Path:
    """The folder that `make ui` fills."""
    return Path(str(files("towerd") / "data" / "ui"))


def ui_files(folder: Path) -> dict[str, Path]:
    """The files of the UI by their paths below `/`; none if it is not built."""
    found: dict[str, Path] = {}
    if (folder / INDEX).is_file():
        for parent, _, names in os.walk(folder):
            for path in (Path(parent, name) for name in names):
                if path.suffix in _TYPES:
                    found[path.relative_to(folder).as_posix()] = path
    return found


async def get_root(request: web.Request) -> web.StreamResponse:
    """The UI; without one, the explorer, which says how to get it."""
    if INDEX not in request.app[UI]:
        raise web.HTTPFound("/towerd/#/no-chat-page")
    return _ui_file(request, INDEX)


async def get_file(request: web.Request) -> web.StreamResponse:
    """A file of the UI, compressed where `make ui` has done so and the client takes it."""
    return _ui_file(request, request.match_info["file"])


def _ui_file(request: web.Request, name: str) -> web.StreamResponse:
    path = request.app[UI].get(name)
    if path is None:
        raise NotFound("File Not Found")
    headers = _HEADERS | {
        "Content-Security-Policy": "frame-ancestors 'none'",
        "Cache-Control": (
            "public, max-age=31536000, immutable" if name.startswith(_HASHED) else "no-cache"
        ),
        "Content-Type": _TYPES[path.suffix],
    }
    return web.FileResponse(path, headers=headers | (_ISOLATED if name == INDEX else {}))
