"""When a request arrived, which may have waited for its model since, in a router as well."""

from __future__ import annotations

import time
from contextlib import suppress

from aiohttp import web

from towerd.api.http.keys import CONFIG

ARRIVED = web.RequestKey("arrived", float)
"""When; time.monotonic."""
WAITED = "X-Towerd-Waited"
"""The header by which a router tells a model's process how many seconds ago that was."""


def note_arrival(request: web.Request) -> None:
    """Set `ARRIVED`."""
    waited_s = 0.0
    if request.app[CONFIG].behind_router:
        with suppress(ValueError):
            waited_s = float(request.headers.get(WAITED, "0"))
    request[ARRIVED] = time.monotonic() - waited_s
