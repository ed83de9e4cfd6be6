"""Routes that need a store but no model. A daemon serves them, and so does towerctl without one."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from towerd.api.admin import pins, upkeep
from towerd.api.admin import segments as own_segments
from towerd.api.admin import sessions as own_sessions
from towerd.api.admin import transfer as own_transfer
from towerd.api.admin import why as own_why


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path, and its handler."""

    method: str
    path: str
    handler: Handler


STORE_ROUTES: tuple[Route, ...] = (
    Route("GET", "/towerd/v1/sessions", own_sessions.list_sessions),
    Route("GET", "/towerd/v1/sessions/{id}", own_sessions.get_session),
    Route("PATCH", "/towerd/v1/sessions/{id}", own_sessions.patch_session),
    Route("DELETE", "/towerd/v1/sessions/{id}", own_sessions.delete_session),
    Route("POST", "/towerd/v1/sessions/{id}/freeze", own_sessions.post_freeze),
    Route("POST", "/towerd/v1/sessions/{id}/thaw", own_sessions.post_thaw),
    Route("GET", "/towerd/v1/sessions/{id}/export", own_transfer.get_export),
    Route("POST", "/towerd/v1/sessions/import", own_transfer.post_import),
    Route("GET", "/towerd/v1/segments", own_segments.list_segments),
    Route("GET", "/towerd/v1/segments/{id}", own_segments.get_segment),
    Route("GET", "/towerd/v1/segments/{id}/why", own_why.get_why),
    Route("GET", "/towerd/v1/trie", own_segments.get_trie),
    Route("GET", "/towerd/v1/pins", pins.list_pins),
    Route("POST", "/towerd/v1/pins", pins.post_pin),
    Route("DELETE", "/towerd/v1/pins/{id}", pins.delete_pin),
    Route("DELETE", "/towerd/v1/bases/{name}", pins.delete_base),
    Route("POST", "/towerd/v1/verify", upkeep.post_verify),
    Route("POST", "/towerd/v1/gc", upkeep.post_gc),
)


def add_routes(app: web.Application, routes: tuple[Route, ...]) -> None:
    """Register a table of routes."""
    for route in routes:
        if route.method == "GET":
            app.router.add_get(route.path, route.handler)  # HEAD as well
        else:
            app.router.add_route(route.method, route.path, route.handler)
