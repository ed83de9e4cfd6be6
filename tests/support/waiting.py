"""Waiting for what happens in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_WAIT_S_MAX = 300.0


def until(done: Callable[[], bool]) -> None:
    """Return once `done()`; fails after five minutes."""
    deadline = time.monotonic() + _WAIT_S_MAX
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def until_async(done: Callable[[], bool]) -> None:
    """The same, asked on the event loop."""
    deadline = time.monotonic() + _WAIT_S_MAX
    while not done():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
