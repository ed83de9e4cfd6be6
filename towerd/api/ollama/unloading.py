"""`keep_alive: 0` to a daemon of one model, which falls asleep then; a router unloads its models itself."""

from __future__ import annotations

from aiohttp import web

from towerd.api.http.access import require_overview
from towerd.api.http.keys import CONFIG, GATE, TENANT
from towerd.errors import NotSupported


def unload_behind(request: web.Request) -> None:
    """Unload the model behind a request, which is answered before, unless others use it then: one of several
    tenants, and whoever attached a llama-server, keeps it loaded."""
    config = request.app[CONFIG]
    if request[TENANT].sees_all and not config.behind_router and config.upstream is None:
        request.app[GATE].unload_behind()


def unload(request: web.Request) -> None:
    """The same for a request that says nothing else. Raises Forbidden for one of several tenants, and
    NotSupported for a llama-server that is not the daemon's."""
    require_overview(request)
    if request.app[CONFIG].upstream is not None:
        raise NotSupported(
            "The llama-server that this daemon is attached to keeps its model loaded"
        )
    unload_behind(request)
