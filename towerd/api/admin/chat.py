"""GET /towerd/v1/sessions/{id}/chat: a conversation as messages; /media/{key}: a picture or a sound of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

from aiohttp import hdrs, web

from towerd.api.admin.sessions import ROW_MAX, in_either
from towerd.api.http.body import BODIES
from towerd.api.http.fields import integer_query
from towerd.api.http.keys import TENANT, service_of
from towerd.api.http.media_type import media_type_of
from towerd.api.http.numbers import numbers_of
from towerd.api.http.reply import encode, raw_reply
from towerd.api.http.sse import write_all
from towerd.errors import NotFound
from towerd.media_ids import spans_of
from towerd.store import SessionInfo, Store
from towerd.store.sessions.foreign import ForeignSession
from towerd.store.sessions.media import KEY_BYTES, medium_key
from towerd.store.tree.scope import tenant_of
from towerd.tokens import Ids

_KEY = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")


async def get_chat(request: web.Request) -> web.Response:
    """The branch that ends with `?turn=`, by default the current one, as messages: of each who said it, where it
    begins in the tokens, and its parts. A frozen session is decoded for that, and stays frozen."""
    service = service_of(request)
    store, numbers = service.store, await numbers_of(request)
    found = await asyncio.to_thread(in_either(request, store.session, store.foreign.session))
    info = found.info if isinstance(found, ForeignSession) else found
    turn = numbers.real(integer_query(request, "turn", 0, 0, ROW_MAX)) or None
    branch = await asyncio.to_thread(service.search.reader.chat, info, turn)
    media = await asyncio.to_thread(lambda: list(_media(store, info, branch.ids)))
    out = {
        "session": info.id,
        "turn": numbers.shown(branch.turn),
        "tokens": len(branch.ids),
        "continues": bool(branch.turn) and tenant_of(info.scope) == request[TENANT].scope,
        "named": branch.is_named,
        "media": media,
        "messages": branch.messages,
    }
    return raw_reply(await asyncio.to_thread(encode, out))


async def get_medium(request: web.Request) -> web.StreamResponse:
    """A picture or a sound of a conversation, as its client sent it."""
    store, key = service_of(request).store, request.match_info["key"]
    found = await asyncio.to_thread(in_either(request, store.session, store.foreign.session))
    info = found.info if isinstance(found, ForeignSession) else found
    row = await asyncio.to_thread(store.media.session, info.id, info.scope, info.tokenizer)
    entry = file = None
    if row is not None and _KEY.fullmatch(key):
        entry = await asyncio.to_thread(store.media.entry, row, bytes.fromhex(key))
    if entry is not None:
        await request.app[BODIES].claim_reply(request, 2 * entry.n_bytes, 0)
        file = await asyncio.to_thread(store.media.read, entry)
    if file is None:
        raise NotFound(
            f"there is no medium {key[:64]!r} of session {request.match_info['id'][:200]!r}"
        )
    headers = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox"}
    response = web.StreamResponse(headers=headers)
    response.content_type = media_type_of(file) or "application/octet-stream"
    response.content_length = len(file)
    await response.prepare(request)
    if request.method == hdrs.METH_HEAD:
        return response
    await write_all(request, response, file)  # what was claimed is held until its client has it
    await response.write_eof()
    return response


def _media(store: Store, info: SessionInfo, ids: Ids) -> Iterator[str | None]:
    """The name of each medium in the tokens of a conversation; None: what its client sent is not kept."""
    spans = spans_of(ids)
    row = store.media.session(info.id, info.scope, info.tokenizer) if spans else None
    known = set() if row is None else store.media.keys(row)
    for start, end in spans:
        key = medium_key(ids[start:end])
        yield key.hex() if key in known else None
