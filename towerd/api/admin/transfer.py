"""/towerd/v1/sessions/{id}/export and /import: sessions as `.tower` files."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from aiohttp import hdrs, web

from towerd.api.admin.sessions import in_either
from towerd.api.http.access import visible_scope
from towerd.api.http.body import BODIES, read_bytes
from towerd.api.http.fields import integer_query
from towerd.api.http.keys import CONFIG, TENANT, TRANSFER, service_of
from towerd.api.http.reply import json_reply
from towerd.api.http.room import bytes_to_import
from towerd.api.http.sse import write_all
from towerd.store import Store
from towerd.store.sessions.foreign import ForeignSession
from towerd.transfer import Export, export_foreign, export_session, import_session, kept_media

log = logging.getLogger(__name__)

MEDIA_HEADER = "X-Towerd-Media"
"""Of an export: how many pictures and sounds it carries, and how many are left out."""


async def get_export(request: web.Request) -> web.StreamResponse:
    """The session as a `.tower` file; which one: see `in_either`. `?media=0`: without its pictures and sounds."""
    service = service_of(request)
    store, coding = service.store, service.cold.coding
    with_media = bool(integer_query(request, "media", 1, 0, 1))

    def own(id: str, scope: str | None) -> Export:
        found = store.session(id, scope)  # before the vocabulary is loaded
        return export_session(store, coding.model(), id, found.scope, with_media=with_media)

    work = in_either(request, own, partial(export_foreign, store, with_media=with_media))
    if with_media:
        await _claim(request, store)
    export = await request.app[TRANSFER].run(work)
    return await _sent(request, store, export)


async def _claim(request: web.Request, store: Store) -> None:
    """Claim RAM for one picture or sound at a time."""
    found = await asyncio.to_thread(in_either(request, store.session, store.foreign.session))
    info = found.info if isinstance(found, ForeignSession) else found
    media = await asyncio.to_thread(kept_media, store, info)
    largest = max((each.n_bytes for each in media), default=0)
    await request.app[BODIES].claim_reply(request, 2 * largest, 0)


async def _sent(request: web.Request, store: Store, export: Export) -> web.StreamResponse:
    """The reply with a file, of which one picture or sound is held at a time."""
    told = f"carried={export.n_media}, left_out={export.n_left_out}"
    response = web.StreamResponse(headers={MEDIA_HEADER: told})
    response.content_type = "application/octet-stream"
    response.content_length = export.n_bytes
    await response.prepare(request)
    if request.method == hdrs.METH_HEAD:
        return response
    await write_all(request, response, export.session)
    for each in export.files:
        data = await asyncio.to_thread(store.media.read, each)
        if data is None:  # whoever reads the file is told that it is damaged
            log.warning("a picture or sound left while its session was exported")
            data = bytes(each.n_bytes)
        await write_all(request, response, data)
        del data
    await response.write_eof()
    return response


async def post_import(request: web.Request) -> web.Response:
    """Import the session of the `.tower` file in the body, for the caller's tenant; the owner may
    name another with `?scope=`. `?media=0`: without its pictures and sounds."""
    service, transfer = service_of(request), request.app[TRANSFER]
    scope = visible_scope(request) or request[TENANT].scope
    since = service.store.deletions.watch()
    with_media = bool(integer_query(request, "media", 1, 0, 1))
    keeps = request.app[CONFIG].keep_media and with_media
    data = await read_bytes(request, bytes_to_import)

    def work() -> dict[str, object]:
        model = service.cold.coding.model()
        return import_session(service.store, model, data, scope, since, keeps_media=keeps)

    imported = await transfer.run(work)
    service.search.changed()
    return json_reply(imported)
