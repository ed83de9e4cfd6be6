"""Backoff: sessions exempt from automatic freezing for a time, after a failure or a thaw."""

from __future__ import annotations

import threading
from collections.abc import Callable

Key = tuple[str, str]
"""(scope, id) of a session."""


class Backoff:
    """Sessions and the time until which each is exempt. Thread-safe. Expired entries are removed
    by `active`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[Key, float] = {}
        self._lock = threading.Lock()

    def delay(self, key: Key, seconds: float) -> None:
        """Exempt a session for `seconds` from now."""
        if seconds > 0:
            with self._lock:
                self._until[key] = self._clock() + seconds

    def active(self) -> set[Key]:
        """The sessions that are still exempt. Forgets the others."""
        now = self._clock()
        with self._lock:
            self._until = {key: until for key, until in self._until.items() if until > now}
            return set(self._until)
