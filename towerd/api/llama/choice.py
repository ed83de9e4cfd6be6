"""One choice of a response while it is being generated."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from towerd.engine.base import Event, Finish, Reuse, Started


@dataclass(slots=True)
class ChoiceState:
    """The state of one GenerateRequest so far."""

    started: Started | None = None
    finish: Finish | None = None
    began: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    """Seconds until the prompt was evaluated; None before."""

    def absorb(self, event: Event) -> None:
        """Update the state with one event of this choice."""
        if isinstance(event, Started):
            self.started = event
            self.first_token_s = time.monotonic() - self.began
        elif isinstance(event, Finish):
            self.finish = event

    @property
    def reuse(self) -> Reuse:
        """Where the prompt came from; empty before the prompt is evaluated."""
        if self.finish is not None:
            return self.finish.reuse
        return self.started.reuse if self.started else Reuse()
