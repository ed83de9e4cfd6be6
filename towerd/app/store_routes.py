"""Routes that need a store but no model. A daemon serves them, and so does towerctl without one."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from towerd.api.admin import (
    chat,
    forget,
    pins,
    segments,
    sessions,
    shared,
    transfer,
    tree_picture,
    upkeep,
)


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path, and its handler."""

    method: str
    path: str
    handler: Handler


STORE_ROUTES: tuple[Route, ...] = (
    Route("GET", "/towerd/v1/sessions", sessions.list_sessions),
    Route("GET", "/towerd/v1/sessions/{id}", sessions.get_session),
    Route("GET", "/towerd/v1/sessions/{id}/chat", chat.get_chat),
    Route("GET", "/towerd/v1/sessions/{id}/media/{key}", chat.get_medium),
    Route("PATCH", "/towerd/v1/sessions/{id}", sessions.patch_session),
    Route("DELETE", "/towerd/v1/sessions/{id}", sessions.delete_session),
    Route("POST", "/towerd/v1/sessions/{id}/freeze", sessions.post_freeze),
    Route("POST", "/towerd/v1/sessions/{id}/thaw", sessions.post_thaw),
    Route("POST", "/towerd/v1/sessions/{id}/recode", upkeep.post_recode),
    Route("GET", "/towerd/v1/sessions/{id}/export", transfer.get_export),
    Route("POST", "/towerd/v1/sessions/import", transfer.post_import),
    Route("POST", "/towerd/v1/shared/push", shared.post_push),
    Route("POST", "/towerd/v1/shared/pull", shared.post_pull),
    Route("POST", "/towerd/v1/shared/rm", shared.post_rm),
    Route("POST", "/towerd/v1/shared/gc", shared.post_gc),
    Route("GET", "/towerd/v1/shared", shared.get_shared),
    Route("GET", "/towerd/v1/search", sessions.get_search),
    Route("GET", "/towerd/v1/segments", segments.list_segments),
    Route("GET", "/towerd/v1/segments/{id}", segments.get_segment),
    Route("GET", "/towerd/v1/segments/{id}/why", segments.get_why),
    Route("GET", "/towerd/v1/trie", segments.get_trie),
    Route("GET", "/towerd/v1/tree", tree_picture.get_tree),
    Route("GET", "/towerd/v1/pins", pins.list_pins),
    Route("POST", "/towerd/v1/pins", pins.post_pin),
    Route("DELETE", "/towerd/v1/pins/{id}", pins.delete_pin),
    Route("DELETE", "/towerd/v1/bases/{name}", pins.delete_base),
    Route("POST", "/towerd/v1/verify", upkeep.post_verify),
    Route("POST", "/towerd/v1/gc", upkeep.post_gc),
    Route("POST", "/towerd/v1/forget", forget.post_forget),
)


def add_routes(app: web.Application, routes: tuple[Route, ...]) -> None:
    """Register the routes of a table."""
    for route in routes:
        if route.method == "GET":
            app.router.add_get(route.path, route.handler)  # HEAD as well
        else:
            app.router.add_route(route.method, route.path, route.handler)
