"""/towerd/v1/sessions/{id}/export and /import: sessions as `.tower` files."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from towerd.api.admin.sessions import in_either
from towerd.api.http.access import visible_scope
from towerd.api.http.body import read_bytes
from towerd.api.http.keys import TENANT, TRANSFER, service_of
from towerd.api.http.reply import json_reply
from towerd.transfer import export_foreign, export_session, import_session


async def get_export(request: web.Request) -> web.Response:
    """The session as a `.tower` file; which one: see `in_either`."""
    service = service_of(request)
    store, coding = service.store, service.cold.coding

    def own(id: str, scope: str | None) -> bytes:
        found = store.session(id, scope)  # before the vocabulary is loaded
        return export_session(store, coding.model(), id, found.scope)

    work = in_either(request, own, partial(export_foreign, store))
    body = await request.app[TRANSFER].run(work)
    return web.Response(body=body, content_type="application/octet-stream")


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
