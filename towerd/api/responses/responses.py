"""/v1/responses/{id}: responses that are kept, and the items that they were made from."""

from __future__ import annotations

import asyncio

from aiohttp import web

from towerd.api.http.fields import flag
from towerd.api.http.keys import TENANT, responses_of
from towerd.api.http.reply import json_reply, raw_reply
from towerd.api.responses.items import ItemQuery
from towerd.errors import NotSupported


async def get_response(request: web.Request) -> web.Response:
    """The object of a response, as it was given."""
    if flag(request, "stream"):
        raise NotSupported("A response is streamed once, while it is made", param="stream")
    return raw_reply(await asyncio.to_thread(responses_of(request).body, *_asked(request)))


async def delete_response(request: web.Request) -> web.Response:
    """Delete a response. What continues it stays, and so does the session of its turn."""
    scope, name = _asked(request)
    await asyncio.to_thread(responses_of(request).delete, scope, name)
    return json_reply({"id": name, "object": "response", "deleted": True})


async def list_input_items(request: web.Request) -> web.Response:
    """The items that a response was made from: those that it continues, and its own."""
    query, table = ItemQuery.of(request), responses_of(request)

    def work() -> bytes:
        return query.page(table.input_items(*_asked(request)))

    return raw_reply(await asyncio.to_thread(work))


def _asked(request: web.Request) -> tuple[str, str]:
    """The tenant, and the response that it names."""
    return request[TENANT].scope, request.match_info["id"]
