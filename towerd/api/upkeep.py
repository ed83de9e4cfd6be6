"""/towerd/v1/stats, verify and gc: looking after the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from towerd import __version__
from towerd.api import fields
from towerd.api.body import read_object
from towerd.api.info import all_stats
from towerd.api.keys import METRICS, service_of
from towerd.api.overview import require_overview
from towerd.api.pins import require_admin
from towerd.api.reply import error_event, json_reply
from towerd.api.sse import EventStream
from towerd.errors import InvalidRequest, TowerdError

QUARANTINE_DAYS = 30.0


async def get_stats(request: web.Request) -> web.Response:
    """Everything the page and towerctl show: counters, gauges, slots."""
    require_overview(request)
    service = service_of(request)
    metrics = request.app[METRICS]
    engine = service.engine
    stats: dict[str, Any] = await all_stats(service)
    return json_reply(
        {
            "version": __version__,
            "engine_name": engine.name,
            "model": engine.info.alias,
            "model_path": engine.info.path,
            "n_ctx": engine.n_ctx,
            "n_slots": engine.n_slots,
            "fidelity": service.tiers.fidelity,
            "fingerprint": engine.info.fingerprint.digest().hex(),
            "uptime_s": round(time.time() - metrics.started_unix, 3),
            "reuse": metrics.reuse_totals(),
            "slots": [
                {
                    "id": slot.id,
                    "is_processing": slot.is_processing,
                    "n_tokens": slot.n_tokens,
                    "n_decoded": slot.n_decoded,
                }
                for slot in engine.slots()
            ],
            **stats,
        }
    )


async def post_verify(request: web.Request) -> web.StreamResponse:
    """Read every stored byte against its checksum; `repair` sets damaged files aside,
    `stream` reports progress in bytes."""
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
    """Progress from the worker thread, the newest only: a slow client misses some."""
    stream = EventStream(request)
    await stream.open({})
    newest: list[tuple[int, int]] = [(0, 0)]

    def progress(done: int, total: int) -> None:
        newest[0] = (done, total)

    running = asyncio.create_task(asyncio.to_thread(work, progress))
    sent = (0, 0)
    while not (await asyncio.wait((running,), timeout=0.2))[0]:
        if newest[0] != sent:
            sent = newest[0]
            await stream.send([{"progress": {"done": sent[0], "total": sent[1]}}])
    try:
        await stream.send([running.result()])
    except TowerdError as error:
        await stream.send([error_event(error)])
    await stream.close()
    return stream.response


async def post_gc(request: web.Request) -> web.Response:
    """Remove what no session, base or pin needs, and quarantined files older than
    `quarantine_days`; with `dry_run` only say what would go."""
    require_admin(request)
    store = service_of(request).store
    body = await read_object(request)
    days = body.get("quarantine_days")
    days_kept = QUARANTINE_DAYS if days is None else fields.number("quarantine_days", days)
    if days_kept < 0:
        raise InvalidRequest("Field 'quarantine_days': must not be negative")
    dry_run = fields.boolean(body, "dry_run", False)
    report = await asyncio.to_thread(store.gc, quarantine_days=days_kept, dry_run=dry_run)
    return json_reply({"gc": asdict(report)})
