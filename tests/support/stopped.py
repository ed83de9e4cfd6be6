"""Processes that are stopped for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil


@contextmanager
def stopped(pid: int) -> Iterator[psutil.Process]:
    """The process stands still inside the block, and runs again afterwards if it is still there."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()
