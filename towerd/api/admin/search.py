"""/towerd/v1/search: the conversations in which words were said."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from towerd.api.admin.sessions import sessions_json, visible_scope
from towerd.api.http.keys import LIMITS, service_of
from towerd.api.http.numbers import numbers_of
from towerd.api.http.query import integer_query
from towerd.api.http.reply import json_reply
from towerd.errors import InvalidRequest

QUERY_CHARS_MAX = 1000


async def get_search(request: web.Request) -> web.Response:
    """The conversations with a turn in which all words of `?q=` occur, the best match first, with
    the words around them."""
    search = service_of(request).search
    typed = request.query.get("q", "")
    if len(typed) > QUERY_CHARS_MAX:
        raise InvalidRequest(f"Query parameter 'q' may have {QUERY_CHARS_MAX} characters")
    limit = integer_query(request, "limit", 20, 1, request.app[LIMITS].page_max)
    found = await asyncio.to_thread(search.find, typed, visible_scope(request), limit)
    listed = await sessions_json(request, [info for _, info in found])
    numbers = await numbers_of(request)
    results: list[dict[str, Any]] = [
        {
            "session": session,
            "turn": numbers.shown(hit.turn),
            "said": hit.said,
            "snippet": hit.snippet,
        }
        for session, (hit, _) in zip(listed, found, strict=True)
    ]
    return json_reply({"query": typed, "results": results})
