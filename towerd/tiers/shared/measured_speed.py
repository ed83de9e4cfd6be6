"""How fast bytes go to the bucket or come from it, as measured last."""

from __future__ import annotations

import time
from dataclasses import dataclass

MEASURE_S = 600.0
"""For so long a measured speed holds."""
MEASURED_BYTES_MIN = 1 << 22
"""Fewer bytes tell how long a request takes, and little of the speed."""


@dataclass(slots=True)
class MeasuredSpeed:
    """Any thread may read it; one writes."""

    _speed: float = 0.0
    _measured_at: float = 0.0

    def moved(self, n_bytes: int, began: float) -> None:
        """Learn from something that has just been moved, if it is long enough. began: time.monotonic() of its
        start"""
        if n_bytes >= MEASURED_BYTES_MIN:
            self._measured_at = time.monotonic()
            self._speed = n_bytes / max(1e-6, self._measured_at - began)

    def bytes_per_s(self) -> float:
        """The last speed; 0 if that is long ago, or never was."""
        return self._speed if time.monotonic() - self._measured_at < MEASURE_S else 0.0
