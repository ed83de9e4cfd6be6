"""What the llama-server engine counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Counters:
    """Since the start; all of it is in /metrics and /towerd/v1/stats."""

    restores: int = 0
    restores_failed: int = 0
    """llama-server refused them."""
    restores_missed: int = 0
    """They were accepted, and then not used by the prompt."""
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
    """Of the saved tokens those that the store lacked."""
    erases: int = 0
    live_missed: int = 0
    """Tokens were believed to be in a slot, and were not."""
    chats_gone_on: int = 0
    """Chat requests that were sent on before their tokens were known."""

    def as_stats(self) -> dict[str, Any]:
        return asdict(self)
