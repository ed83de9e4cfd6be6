"""An event loop whose time passes only while it waits, and then at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Skipping(selectors.DefaultSelector):
    """Waits for nothing."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "the loop would wait for ever"
        self.skipped_s += timeout
        return super().select(0)


class VirtualClock(asyncio.SelectorEventLoop):
    """For code that waits for timers alone: neither sockets nor threads."""

    def __init__(self) -> None:
        self.skipping = _Skipping()
        super().__init__(self.skipping)

    def time(self) -> float:
        """Seconds that were waited."""
        return self.skipping.skipped_s


def run_at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run what would take long."""
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return runner.run(work)
