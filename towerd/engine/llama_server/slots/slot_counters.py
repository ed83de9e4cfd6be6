"""SlotCounters: what was moved in and out of slots since the start."""

from __future__ import annotations

from dataclasses import dataclass

from towerd.engine.llama_server.process.upstream_client import SlotAction
from towerd.engine.llama_server.slots.slot_rows import Restored


@dataclass(slots=True)
class SlotCounters:
    """All of them are in /metrics and /towerd/v1/stats."""

    restores: int = 0
    restores_failed: int = 0
    """Restores that llama-server refused."""
    restores_missed: int = 0
    """Restores that were accepted, and then not used by the prompt."""
    restore_bytes: int = 0
    restore_ms: float = 0.0
    """Composing and restoring, as a request waited for it."""
    blocked_ms: float = 0.0
    """Time in which a save or restore kept all slots from moving."""
    composed_tokens: int = 0
    saves: int = 0
    saves_failed: int = 0
    save_bytes: int = 0
    captured_tokens: int = 0
    """Saved tokens that the store lacked."""
    erases: int = 0
    live_missed: int = 0
    """Prompts for which a slot did not hold the tokens that it was believed to hold."""

    def restored(self, restored: Restored) -> None:
        """Count a restore."""
        self.restores += 1
        self.restore_bytes += restored.n_bytes
        self.restore_ms += restored.ms
        self.blocked_ms += restored.blocked_ms
        self.composed_tokens += restored.n

    def saved(self, done: SlotAction) -> None:
        """Count a save."""
        self.saves += 1
        self.save_bytes += done.n_bytes
        self.blocked_ms += done.ms
