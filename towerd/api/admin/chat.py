"""GET /towerd/v1/sessions/{id}/chat: a conversation as messages."""

from __future__ import annotations

import asyncio

from aiohttp import web

from towerd.api.admin.sessions import ROW_MAX, in_either
from towerd.api.http.fields import integer_query
from towerd.api.http.keys import TENANT, service_of
from towerd.api.http.numbers import numbers_of
from towerd.api.http.reply import encode, raw_reply
from towerd.store.sessions.foreign import ForeignSession
from towerd.store.tree.scope import tenant_of


async def get_chat(request: web.Request) -> web.Response:
    """The branch that ends with `?turn=`, by default the current one, as messages: of each who said it, where it
    begins in the tokens, and its parts. A frozen session is decoded for that, and stays frozen."""
    service = service_of(request)
    store, numbers = service.store, await numbers_of(request)
    found = await asyncio.to_thread(in_either(request, store.session, store.foreign.session))
    info = found.info if isinstance(found, ForeignSession) else found
    turn = numbers.real(integer_query(request, "turn", 0, 0, ROW_MAX)) or None
    branch = await asyncio.to_thread(service.search.reader.chat, info, turn)
    out = {
        "session": info.id,
        "turn": numbers.shown(branch.turn),
        "tokens": len(branch.ids),
        "continues": bool(branch.turn) and tenant_of(info.scope) == request[TENANT].scope,
        "messages": branch.messages,
    }
    return raw_reply(await asyncio.to_thread(encode, out))
