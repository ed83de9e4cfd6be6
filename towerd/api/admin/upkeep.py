"""/towerd/v1/verify, gc and sessions/{id}/recode: maintenance of the store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from towerd.api.admin.pins import require_admin
from towerd.api.admin.sessions import own_session, sessions_json
from towerd.api.http import fields
from towerd.api.http.body import read_object
from towerd.api.http.keys import service_of
from towerd.api.http.middleware import is_owner_socket
from towerd.api.http.reply import error_event, json_reply
from towerd.api.http.sse import EventStream
from towerd.errors import InvalidRequest, TowerdError

QUARANTINE_DAYS = 30.0


async def post_verify(request: web.Request) -> web.StreamResponse:
    """Check every stored byte against its checksum; `repair` quarantines damaged files, `stream`
    reports progress in bytes."""
    require_admin(request)
    store = service_of(request).store
    body = await read_object(request)
    repair = fields.boolean(body, "repair", False)

    def work(progress: Callable[[int, int], None] | None) -> dict[str, Any]:
        report = store.verify(progress, repair=repair)
        return {"verify": {"ok": report.ok, **asdict(report)}}

    if not fields.boolean(body, "stream", False):
        return json_reply(await asyncio.to_thread(work, None))
    return await _stream_verify(request, work)


async def _stream_verify(
    request: web.Request, work: Callable[[Callable[[int, int], None]], dict[str, Any]]
) -> web.StreamResponse:
    """Stream the latest progress of the worker thread: a slow client misses some. The work ends
    when the client leaves."""
    stream = EventStream(request)
    await stream.open({})
    newest: list[tuple[int, int]] = [(0, 0)]
    gone = threading.Event()

    def progress(done: int, total: int) -> None:
        if gone.is_set():
            raise ConnectionResetError
        newest[0] = (done, total)

    running = asyncio.create_task(asyncio.to_thread(work, progress))
    sent = (0, 0)
    try:
        while not (await asyncio.wait((running,), timeout=0.2))[0]:
            if newest[0] != sent:
                sent = newest[0]
                await stream.send([{"progress": {"done": sent[0], "total": sent[1]}}])
        await stream.send([running.result()])
    except TowerdError as error:
        in_full = is_owner_socket(request)
        await stream.write(error_event(request.path, error, in_full=in_full))
    finally:
        gone.set()
        await asyncio.gather(running, return_exceptions=True)
    await stream.close()
    return stream.response


async def post_gc(request: web.Request) -> web.Response:
    """Remove what no session, base or pin needs, and quarantined files older than
    `quarantine_days`; with `dry_run` only report what would be removed."""
    require_admin(request)
    store = service_of(request).store
    body = await read_object(request)
    days = body.get("quarantine_days")
    days_kept = QUARANTINE_DAYS if days is None else fields.number("quarantine_days", days)
    if days_kept < 0:
        raise InvalidRequest("Field 'quarantine_days': must not be negative")
    dry_run = fields.boolean(body, "dry_run", False)
    report = await asyncio.to_thread(store.gc, quarantine_days=days_kept, dry_run=dry_run)
    if not dry_run:
        await asyncio.to_thread(service_of(request).search.erase)
    return json_reply({"gc": asdict(report)})


async def post_recode(request: web.Request) -> web.Response:
    """Code a session that is frozen, or has a copy in coded form, again with today's tables."""
    require_admin(request)
    service, found = service_of(request), await own_session(request)
    recoded = await service.cold.recode(found.id, found.scope)
    info = await asyncio.to_thread(service.store.session, found.id, found.scope)
    return json_reply({"session": (await sessions_json(request, [info]))[0], "changed": recoded})
