"""The event loop of a daemon: running it, how late it is, and what ends it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any

import uvloop
from aiohttp import web

from towerd.api.http.keys import REQUESTS
from towerd.system.priority import shorten_slice

LAG_PROBE_S = 0.25
SWITCH_INTERVAL_S = 0.001
GC_THRESHOLDS = (5000, 10, 1000)


def run_on_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` on a loop that is fast to react."""
    # A worker thread that runs Python yields to the event loop after this long.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    shorten_slice()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def tune_gc() -> None:
    """Keep Python's garbage collector from blocking the event loop: what is loaded (the prefix tree
    of a big store is a million objects) is never traversed again, and full collections become rare.
    There is no collection now either: imports leave little garbage."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


def stop_event() -> asyncio.Event:
    """An event set by SIGINT or SIGTERM; a second signal ends the process immediately."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        if event.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        event.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    return event


async def watch_lag(app: web.Application) -> AsyncIterator[None]:
    """Measure how late the loop runs a timer."""

    async def probe() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            app[REQUESTS].lag.observe(max(loop.time() - due, 0.0))

    task = asyncio.create_task(probe())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
