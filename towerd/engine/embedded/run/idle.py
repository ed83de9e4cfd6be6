"""Live sequences that no request uses: exports and evicts them.

Called by the inference thread only.
"""

from __future__ import annotations

import logging
import time

from towerd.engine.embedded.live.pool import LivePool, LiveSeq
from towerd.engine.embedded.live.saved import Saved
from towerd.engine.embedded.restore.exporter import Exporter
from towerd.engine.embedded.restore.restorer import Restorer

log = logging.getLogger(__name__)

EXPORT_EVERY_S = 5.0
"""While streams run, dirty sequences are exported at most this often: it costs them a step."""
IDLE_CELLS_MAX = 256
"""Cells that idle sequences keep while one request runs; n requests allow an n-th of it. On a CPU
every step scans all cells in use for every running request, at about 1.6 us a cell (1B shape);
restoring an idle cell's row from RAM costs 5 us once, as much as scanning it for four tokens.
Twelve chats of 700 tokens in turn (100M shape): 13.5 ms a token with 128 cells, 19 with 1,024."""


class IdleSequences:
    """Exports and evicts sequences between their requests."""

    def __init__(self, pool: LivePool, restorer: Restorer, exporter: Exporter) -> None:
        self.n_exports = 0
        self._pool = pool
        self._restorer = restorer
        self._exporter = exporter
        self._last_export = 0.0

    @property
    def is_dirty(self) -> bool:
        """Whether an idle sequence may hold rows that the store lacks."""
        return any(s.dirty and not s.busy for s in self._pool)

    @property
    def is_export_due(self) -> bool:
        """Whether the last export is more than `EXPORT_EVERY_S` ago."""
        return time.monotonic() - self._last_export > EXPORT_EVERY_S

    def export_one(self) -> bool:
        """Export the rows of one dirty sequence; False when none is dirty."""
        dirty = [s for s in self._pool if s.dirty and not s.busy]
        if not dirty:
            return False
        self._last_export = time.monotonic()
        self._export(min(dirty, key=lambda s: s.last_used))
        self.n_exports += 1
        return True

    def evict_surplus(self, n_running: int) -> None:
        """Evict an idle sequence if keeping it slows the running requests by more than it saves."""
        n_idle = self._pool.cells_used - self._pool.cells_busy()
        if n_idle * n_running > IDLE_CELLS_MAX and self._restorer.can_restore_evicted:
            self.evict_one()

    def evict_one(self) -> bool:
        """Free the least recently used idle sequence; False when all sequences are busy."""
        seq = self._pool.idle_lru()
        if seq is None:
            return False
        self._export(seq)
        self._restorer.drop(seq)
        return True

    def export_recorded(self, seq: LiveSeq) -> None:
        """Export what the store lacks of a sequence that its job gives up: the rows of the turns
        before."""
        if seq.dirty:
            self._export(seq)

    def export_saved(self, saved: Saved) -> None:
        """Export what a job had that was preempted and ended without running again."""
        try:
            self._exporter.export_saved(saved)
        except Exception:
            log.exception("the rows of a preempted request are not stored")

    def _export(self, seq: LiveSeq) -> None:
        """Export `seq`. A failure is logged, so that it does not keep the sequence's cells in
        use."""
        try:
            self._exporter.export(seq)
        except Exception:
            log.exception("the rows of an idle sequence are not stored")
