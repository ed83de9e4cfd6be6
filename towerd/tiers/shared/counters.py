"""Counters of the shared tier."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class SharedCounters:
    """Since the start."""

    put: int = 0
    fetched: int = 0
    missing: int = 0
    damaged: int = 0
    saved: int = 0
    """Files whose rows were put because they were about to leave the disk."""
    errors: int = 0
    collected: int = 0
    bytes_put: int = 0
    bytes_collected: int = 0
    bytes_fetched: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **counts: int) -> None:
        """Count more of each. Any thread may call it."""
        with self._lock:
            for name, n in counts.items():
                setattr(self, name, getattr(self, name) + n)

    def stats(self) -> dict[str, Any]:
        """By their names in GET /towerd/v1/stats."""
        return {
            "objects_put": self.put,
            "objects_fetched": self.fetched,
            "objects_missing": self.missing,
            "objects_damaged": self.damaged,
            "files_saved": self.saved,
            "errors": self.errors,
            "objects_deleted": self.collected,
            "bytes_deleted": self.bytes_collected,
            "bytes_put": self.bytes_put,
            "bytes_fetched": self.bytes_fetched,
        }
