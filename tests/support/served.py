"""An app on a free port, in the test's own process."""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from towerd.api.http.connection import ConnectionRunner
from towerd.app.loop import SWITCH_INTERVAL_S, tune_gc


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """Its URL."""
    runner = ConnectionRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@contextmanager
def tuned() -> Iterator[None]:
    """Set up the process as `towerd serve` does once everything is loaded."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    tune_gc()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
