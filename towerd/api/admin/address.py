"""GET /towerd/v1/address: where clients find this daemon."""

from __future__ import annotations

from aiohttp import web

from towerd.api.http.keys import LISTENING, TENANTS
from towerd.api.http.reply import json_reply


async def get_address(request: web.Request) -> web.Response:
    """The addresses that it listens on, and whether callers need a key there."""
    app = request.app
    return json_reply({"urls": app[LISTENING], "needs_key": app[TENANTS].required})
