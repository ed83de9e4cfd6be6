"""One request on its way through the inference thread."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

import numpy as np

from towerd.engine.base import (
    Finish,
    GenerateRequest,
    Ids,
    Progress,
    Reuse,
    Started,
    StopType,
    Timings,
)
from towerd.engine.embedded.context import Buffer
from towerd.engine.embedded.output import OutputText
from towerd.engine.embedded.pool import LiveSeq
from towerd.engine.embedded.sampler import Sampler


class Phase(enum.Enum):
    """Where a job stands; it only moves down this list, but for a preemption."""

    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(eq=False, slots=True)
class Job:
    """State of one request. Touched by the inference thread only, but for `cancelled`."""

    request: GenerateRequest
    ids: Ids
    """int32: the prompt as evaluated (after a context shift), then every sampled token."""
    n_prompt: int
    truncated: bool = False
    phase: Phase = Phase.WAITING
    cancelled: bool = False
    seq: LiveSeq | None = None
    sampler: Sampler | None = None
    output: OutputText | None = None
    reuse: Reuse = field(default_factory=Reuse)
    reply: list[int] = field(default_factory=list)
    """Sampled tokens whose text was sent or is held back only for UTF-8 or a stop string."""
    saved: tuple[int, Buffer] | None = None
    """Live tokens and sequence blob of a preempted job."""
    n_in_batch: int = 0
    logits_index: int = -1
    t_submit: float = field(default_factory=time.monotonic)
    t_prompt: float = 0.0
    t_first: float = 0.0
    shifts: int = 0

    @property
    def n(self) -> int:
        """Tokens of prompt and reply so far."""
        return len(self.ids)

    @property
    def n_live(self) -> int:
        """Tokens whose rows are in the context."""
        return self.seq.n if self.seq is not None else 0

    @property
    def n_to_evaluate(self) -> int:
        return self.n - self.n_live

    def push(self, token: int) -> None:
        """Append a sampled token; it still has to be decoded."""
        self.ids = np.append(self.ids, np.int32(token))
        self.reply.append(token)

    def progress(self) -> Progress:
        cached = self.reuse.live + self.reuse.hot + self.reuse.warm
        elapsed_ms = (time.monotonic() - self.t_prompt) * 1e3
        return Progress(self.n_prompt, cached, self.n_live, elapsed_ms)

    def started(self) -> Started:
        return Started(self.reuse, self.n_prompt)

    def finish(self, stop: StopType, word: str, n_kept: int) -> Finish:
        """The closing event; `n_kept` reply tokens had all their text sent."""
        now = time.monotonic()
        first = self.t_first or now
        prompt_s = (first - self.t_prompt) if self.t_prompt else 0.0
        cached = self.reuse.live + self.reuse.hot + self.reuse.warm
        timings = Timings(
            cache_n=cached,
            prompt_n=self.n_prompt - cached if self.t_prompt else 0,
            prompt_ms=prompt_s * 1e3,
            predicted_n=len(self.reply),
            predicted_ms=(now - first) * 1e3 if self.t_first else 0.0,
        )
        n_cached = min(self.n_live, self.n_prompt + n_kept)
        if self.truncated:  # the live tokens are not a prefix of the conversation's
            n_cached = len(self.request.ids) + max(0, n_kept - 1)
        return Finish(
            stop=stop,
            stopping_word=word,
            ids=tuple(self.reply[:n_kept]),
            n_cached=n_cached,
            timings=timings,
            reuse=self.reuse,
            truncated=self.truncated,
        )
