"""Progress reports of a training job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Status:
    """The state of training after a step."""

    step: int
    n_tokens: int
    loss: float
    """Smoothed, nats per token."""
    progress: float
    """Share of the budget that is used, 0 to 1."""
    tokens_per_s: float
    """Speed of the last step."""


class TrainingProgress(Protocol):
    """Receives the progress of a training job."""

    def encoded(self, done: int, total: int) -> None:
        """Called when `done` of `total` records have been encoded."""
        ...

    def learned(self, status: Status) -> None:
        """Called after each step."""
        ...
