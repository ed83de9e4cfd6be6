"""What a course of training tells about itself while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Status:
    """Where training stands after a step."""

    step: int
    n_tokens: int
    loss: float
    """Smoothed, nats per token."""
    progress: float
    """Share of the budget that is used, 0 to 1."""
    tokens_per_s: float
    """Of the last step."""


class Progress(Protocol):
    """Someone who is told."""

    def encoded(self, done: int, total: int) -> None:
        """Records turned into ids."""
        ...

    def learned(self, status: Status) -> None:
        """One more step."""
        ...
