"""`keep_alive` to a daemon of one model, which falls asleep when that is over; a router unloads its models itself."""

from __future__ import annotations

from aiohttp import web

from towerd.api.http.access import require_overview
from towerd.api.http.keep_alive import STAYS
from towerd.api.http.keys import CONFIG, TENANT
from towerd.errors import NotSupported


def keep_alive(request: web.Request, seconds: float | None) -> None:
    """Unload the model so long after a request, unless it is refused or others use the model then. None: the request
    says nothing. One of several tenants, and whoever attached a llama-server, does not decide that."""
    config = request.app[CONFIG]
    decides = request[TENANT].sees_all and not config.behind_router and config.upstream is None
    if seconds is not None and decides:
        request[STAYS] = seconds


def unload(request: web.Request) -> None:
    """Unload the model for a request that says nothing else. Raises Forbidden for one of several tenants, and
    NotSupported for a llama-server that is not the daemon's."""
    require_overview(request)
    if request.app[CONFIG].upstream is not None:
        raise NotSupported(
            "The llama-server that this daemon is attached to keeps its model loaded"
        )
    keep_alive(request, 0.0)
