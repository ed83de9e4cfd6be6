"""/lora-adapters: the LoRA adapters of the embedded engine's model, and their scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from aiohttp import web

from towerd.api.http.access import require_admin
from towerd.api.http.body import decode, read_bytes
from towerd.api.http.keys import service_of
from towerd.api.http.reply import json_reply
from towerd.errors import InvalidRequest

if TYPE_CHECKING:  # llama.cpp is loaded with the model, after the address is listened on
    from towerd.engine.embedded.context.adapters import Adapters


async def get_adapters(request: web.Request) -> web.Response:
    """The adapters in the order of their numbers, with the default scales of requests."""
    return json_reply(_adapters(request).listing())


async def post_adapters(request: web.Request) -> web.Response:
    """Set the scales: an array of `id` and `scale`; adapters not named get 0."""
    require_admin(request)
    body = await decode(request, await read_bytes(request))
    if not isinstance(body, list):
        raise InvalidRequest("Request body must be an array")
    _adapters(request).set_scales(body)
    return json_reply({"success": True})


def _adapters(request: web.Request) -> Adapters:
    return cast("Adapters", service_of(request).engine.adapters)
