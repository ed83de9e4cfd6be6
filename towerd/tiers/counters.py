"""TierCounters of the tiers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TierCounters:
    """Segments and bytes since the start."""

    written: int = 0
    promoted: int = 0
    hot_evicted: int = 0
    warm_evicted: int = 0
    damaged: int = 0
    write_errors: int = 0
    bytes_written: int = 0

    def stats(self) -> dict[str, int]:
        """TierCounters by their names in /metrics, except `damaged`, which has other contributors."""
        return {
            "segments_written": self.written,
            "segments_promoted": self.promoted,
            "hot_evictions": self.hot_evicted,
            "warm_evictions": self.warm_evicted,
            "write_errors": self.write_errors,
            "bytes_written": self.bytes_written,
        }
