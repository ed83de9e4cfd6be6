"""/towerd/v1/sessions/{id}/export and /import: sessions as `.tower` files."""

from __future__ import annotations

from contextlib import suppress

from aiohttp import web

from towerd.api.admin.sessions import served_tokenizer, visible_scope
from towerd.api.http.body import read_bytes
from towerd.api.http.keys import TENANT, TRANSFER, service_of
from towerd.api.http.reply import json_reply
from towerd.errors import NotFound
from towerd.transfer import export_foreign, export_session, import_session


async def get_export(request: web.Request) -> web.Response:
    """The session as a `.tower` file: one of the served model's tokenizer, or else one of another, or
    at once the one of `?tokenizer=`."""
    service, transfer = service_of(request), request.app[TRANSFER]
    id, scope = request.match_info["id"], visible_scope(request)

    tokenizer = request.query.get("tokenizer", "")

    def export_own() -> bytes:
        found = service.store.session(id, scope)  # before the vocabulary is loaded
        return export_session(service.store, service.cold.coding.model(), id, found.scope)

    def work() -> bytes:
        if tokenizer == served_tokenizer(request):
            return export_own()
        if not tokenizer:
            with suppress(NotFound):
                return export_own()
        return export_foreign(service.store, id, scope, tokenizer)

    return web.Response(body=await transfer.run(work), content_type="application/octet-stream")


async def post_import(request: web.Request) -> web.Response:
    """Import the session of the `.tower` file in the body, for the caller's tenant; the owner may
    name another with `?scope=`."""
    service, transfer = service_of(request), request.app[TRANSFER]
    scope = visible_scope(request) or request[TENANT].scope
    since = service.store.deletions.watch()
    data = await read_bytes(request)

    def work() -> dict[str, object]:
        return import_session(service.store, service.cold.coding.model(), data, scope, since)

    imported = await transfer.run(work)
    service.search.changed()
    return json_reply(imported)
