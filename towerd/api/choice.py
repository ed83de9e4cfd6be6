"""One choice of a response while it is being generated."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from towerd.engine.base import (
    Event,
    Finish,
    GenerateRequest,
    Piece,
    Reuse,
    Started,
    Timings,
    TokenProbs,
)


@dataclass(slots=True)
class Choice:
    """What has been generated for one GenerateRequest so far."""

    index: int
    request: GenerateRequest
    keep: bool
    """Keep text, ids and probabilities for a reply that is sent in one piece."""
    parts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    probs: list[TokenProbs] = field(default_factory=list)
    n_decoded: int = 0
    has_new_line: bool = False
    started: Started | None = None
    finish: Finish | None = None
    began: float = field(default_factory=time.monotonic)
    first_token: float | None = None

    def absorb(self, event: Event) -> None:
        """Account for one event of this choice."""
        if isinstance(event, Started):
            self.started = event
            self.first_token = time.monotonic()
        elif isinstance(event, Piece):
            self.n_decoded += len(event.ids)
            self.has_new_line = self.has_new_line or "\n" in event.text
            if self.keep:
                self.parts.append(event.text)
                self.ids.extend(event.ids)
                self.probs.extend(event.probs)
        elif isinstance(event, Finish):
            self.finish = event

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def n_prompt(self) -> int:
        return len(self.request.ids)

    @property
    def reuse(self) -> Reuse:
        """Where the prompt came from; nothing is known before it is evaluated."""
        if self.finish is not None:
            return self.finish.reuse
        return self.started.reuse if self.started else Reuse()

    def timings(self) -> Timings:
        """The engine's figures once finished, until then the API's own clock."""
        if self.finish is not None:
            return self.finish.timings
        reuse = self.reuse
        now = time.monotonic()
        if self.started is None or self.first_token is None:
            return Timings(0, 0, 0.0, 0, 0.0)
        measured = (self.first_token - self.began) * 1e3
        return Timings(
            cache_n=reuse.live + reuse.hot + reuse.warm,
            prompt_n=reuse.prefill,
            prompt_ms=self.started.prompt_ms or measured,
            predicted_n=self.n_decoded,
            predicted_ms=(now - self.first_token) * 1e3,
        )
