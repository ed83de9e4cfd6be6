"""/towerd/v1/verify, gc, calibration and sessions/{id}/recode: maintenance of the store, and the measured cost
of stored formats for this model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from aiohttp import web

from towerd.api.admin.sessions import own_session, sessions_json
from towerd.api.http import fields
from towerd.api.http.access import require_admin
from towerd.api.http.body import read_object
from towerd.api.http.keys import service_of
from towerd.api.http.reply import json_reply
from towerd.api.http.sse import event_stream
from towerd.errors import InvalidRequest, NotSupported

if TYPE_CHECKING:
    from towerd.engine.embedded.calibration.calibrate import Calibrator

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
    newest: list[tuple[int, int]] = [(0, 0)]
    gone = threading.Event()

    def progress(done: int, total: int) -> None:
        if gone.is_set():
            raise ConnectionResetError
        newest[0] = (done, total)

    async with event_stream(request) as stream:
        running = asyncio.create_task(asyncio.to_thread(work, progress))
        sent = (0, 0)
        try:
            while not (await asyncio.wait((running,), timeout=0.2))[0]:
                if newest[0] != sent:
                    sent = newest[0]
                    await stream.send([{"progress": {"done": sent[0], "total": sent[1]}}])
            await stream.send([running.result()])
        finally:
            gone.set()
            await asyncio.gather(running, return_exceptions=True)
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


async def get_calibration(request: web.Request) -> web.Response:
    """The progress of the calibration, and its result."""
    return json_reply({"calibration": _calibrator(request).view()})


async def post_calibration(request: web.Request) -> web.Response:
    """Start calibration now; `again`: even if there is a result already; `formats`: of stored formats,
    too."""
    require_admin(request)
    calibrator = _calibrator(request)
    body = await read_object(request)
    again, formats = fields.boolean(body, "again", False), fields.boolean(body, "formats", True)
    calibrator.request(again=again, formats=formats)
    return json_reply({"calibration": calibrator.view()})


def _calibrator(request: web.Request) -> Calibrator:
    """The calibrator. Raises NotSupported without one: only the embedded engine can measure."""
    found: Calibrator | None = getattr(service_of(request).engine, "calibrator", None)
    if found is None:
        raise NotSupported("Calibration needs the model in the daemon: use --engine embedded.")
    return found
