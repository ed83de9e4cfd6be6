"""Backoff: sessions exempt from automatic freezing for a while, after a failure or a thaw."""

from __future__ import annotations

import threading
from collections.abc import Callable

Key = tuple[str, str]
"""(scope, id) of a session."""


class Waits:
    """Thread-safe; as many as sessions were put off within the longest time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[Key, float] = {}
        self._lock = threading.Lock()

    def put_off(self, key: Key, seconds: float) -> None:
        """Leave a session alone for so long."""
        if seconds > 0:
            with self._lock:
                self._until[key] = self._clock() + seconds

    def now(self) -> set[Key]:
        """Those that still are to be left alone; the others are forgotten."""
        now = self._clock()
        with self._lock:
            self._until = {key: until for key, until in self._until.items() if until > now}
            return set(self._until)
