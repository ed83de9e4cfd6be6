"""llama.cpp's own web UI at /, from the files that `make ui` builds and wheels carry."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from aiohttp import web

from towerd.api.admin.page import get_root as get_explorer
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
_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
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
    """The UI's page; without one, the way to the explorer."""
    if INDEX not in request.app[UI]:
        return await get_explorer(request)
    return _sent(request.app[UI], INDEX)


async def get_file(request: web.Request) -> web.StreamResponse:
    """A file of the UI, compressed where `make ui` has done so and the client takes it."""
    return _sent(request.app[UI], request.match_info["file"])


def _sent(known: Mapping[str, Path], name: str) -> web.StreamResponse:
    path = known.get(name)
    if path is None:
        raise NotFound("File Not Found")
    age = "public, max-age=31536000, immutable" if name.startswith(_HASHED) else "no-cache"
    headers = _HEADERS | {"Cache-Control": age, "Content-Type": _TYPES[path.suffix]}
    return web.FileResponse(path, headers=headers | (_ISOLATED if name == INDEX else {}))
