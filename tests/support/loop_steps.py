"""What the steps of event loops cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest


def time_steps(patch: pytest.MonkeyPatch, told: Callable[[float, asyncio.Handle], None]) -> None:
    """From here on `told(seconds, handle)` after every callback of an event loop, on its thread: the
    CPU time that it took, which other processes cannot add to."""
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        told(time.thread_time() - began, handle)

    patch.setattr(asyncio.events.Handle, "_run", timed)
