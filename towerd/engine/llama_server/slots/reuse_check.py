"""ReuseCheck: compares how many tokens llama-server reused with how many were in place."""

from __future__ import annotations

import logging

from towerd.engine.llama_server.slots.placer import Placer
from towerd.engine.llama_server.slots.slot_upkeep import SlotUpkeep

log = logging.getLogger(__name__)

MISSES_MAX = 5
"""After this many restores in a row that were not used, no more are tried."""


class ReuseCheck:
    """Draws the consequences of tokens that were evaluated again although they were in place."""

    def __init__(self, placer: Placer, upkeep: SlotUpkeep, notes: list[str]) -> None:
        """notes: the engine's, to which one may be added"""
        self._placer = placer
        self._upkeep = upkeep
        self._notes = notes
        self._misses = 0

    def prefilled(self, n: int, ms: float) -> None:
        """Learn from a reply how long evaluating `n` prompt tokens takes."""
        self._placer.policy.costs.observe_prefill(n, ms)

    def reused(self, n: int, expected: int, *, restored: bool) -> None:
        """Called when a reply says that `n` tokens were reused. `restored`: those `expected` came
        from a restore for this request."""
        if n >= expected:
            self._misses = 0 if restored else self._misses
        elif restored:
            self._restore_missed(expected, n)
        else:
            self._placer.counters.live_missed += 1
            self._upkeep.doubt()  # maybe it was restarted without towerd's knowledge

    def _restore_missed(self, expected: int, n: int) -> None:
        self._placer.counters.restores_missed += 1
        self._misses += 1
        log.warning("a restored slot was not used", extra={"restored": expected, "used": n})
        if self._misses < MISSES_MAX or not self._placer.can_compose:
            return
        self._placer.stop_composing()
        note = (
            f"Nothing is restored any more: {self._misses} restored slots in a row were not used, "
            "so this llama-server computes everything anyway."
        )
        self._notes.append(note)
        log.error(note)
