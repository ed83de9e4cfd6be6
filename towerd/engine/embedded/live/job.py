"""One request on its way through the inference thread."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from towerd.engine.base import (
    Finish,
    GenerateRequest,
    Progress,
    Reuse,
    SlotView,
    Started,
    StopType,
    Timings,
    tokens_per_second,
)
from towerd.engine.embedded.context.adapters import Adapted
from towerd.engine.embedded.context.sequences import Buffer
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.engine.embedded.live.saved import Saved
from towerd.engine.moving.moves import Moves
from towerd.engine.served import ServedAnswer
from towerd.media_ids import Span
from towerd.store import Handle
from towerd.tokens import Ids, common_prefix
from towerd.wire import Reply

_ROOM_MIN = 64


class JobPhase(enum.Enum):
    """The phase of a job. It moves down this list; back to LOADING for rows or a medium in the middle of a
    prompt, and to WAITING when the job is preempted or its rows turn out to be gone."""

    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(eq=False, slots=True)
class Job:
    """The state of one request. Used by the inference thread only, except `cancelled`."""

    request: GenerateRequest
    ids: Ids
    """int32: the prompt as evaluated (after a context shift), then every sampled token."""
    n_prompt: int
    path: Handle
    """What the store knows of the request's tokens."""
    adapted: Adapted = ()
    """The LoRA adapters that it is evaluated under, with their scales."""
    truncated: bool = False
    """Shortened by a context shift: the live tokens are not the conversation's."""
    is_full: bool = False
    """Ended because its context was full."""
    task: int = -1
    """Which request of this engine it is, counted from 0; -1 while it waits."""
    slot: int = -1
    """Where GET /slots shows it."""
    phase: JobPhase = JobPhase.WAITING
    cancelled: bool = False
    cut_off: Finish | None = None
    """What was generated before it failed."""
    seq: LiveSeq | None = None
    output: Reply | None = None
    """Samples, and keeps the text; None: nothing is generated."""
    reuse: Reuse = field(default_factory=Reuse)
    reply: list[int] = field(default_factory=list)
    """The sampled tokens."""
    served: ServedAnswer | None = None
    """What the reply is sampled from, if that is computed over moved rows."""
    saved: Saved | None = None
    """What a preempted job had live."""
    n_preempted: int = 0
    """How often it was preempted; if ever, a parked chat that it finds may be its own."""
    n_passed: int = 0
    """How many jobs began before it while there was no room for it."""
    media: tuple[Span, ...] = ()
    """Where media stand in its prompt, ascending."""
    checkpoints_at: tuple[int, ...] = ()
    """Positions of its prompt, ascending, at which a state checkpoint is to be taken."""
    n_broken: int = 0
    """Loads that ended before all planned rows had come."""
    n_begun: int = -1
    """Position of the first token that was evaluated for it, if its chat can recall; -1: none."""
    before_recall: tuple[int, Buffer] | None = None
    """How many tokens were live before the last ones of its prompt, and their state, if that cannot be cut."""
    was_recalled: bool = False
    """Whether the rows that the prompt looks for were recalled."""
    moves: Moves | None = None
    """The runs that are kept in its prompt behind other text; None: none."""
    loads: int = 0
    """How many loads were started; blobs of an earlier one are stale."""
    n_loaded_hot: int = 0
    """Tokens whose rows came from RAM, moved ones among them."""
    n_loaded_warm: int = 0
    """Tokens whose rows came from files."""
    in_batch: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    """Its tokens in the batch, the draft among them."""
    batch_index: int = 0
    """Index in the batch of its first token."""
    logits_index: int = -1
    """Index in the batch of its newest token, from which on logits are asked for (for the draft as
    well); -1: none are."""
    draft: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    """int32: tokens that may follow, to be evaluated with the newest one."""
    undo: tuple[int, Buffer] | None = None
    """How many tokens were live before the draft, and their state, if that cannot be cut."""
    _room: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    """The buffer that `ids` is a view of once there is a reply, so that a long chat is not copied
    at every token."""
    t_submit: float = field(default_factory=time.monotonic)
    t_prompt: float = 0.0
    t_first: float = 0.0

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        prefetch = self.request.prefetch
        return self.cancelled or (prefetch is not None and prefetch.is_over)

    @property
    def compared(self) -> range:
        """The positions of its batch at which it compares what another request was served."""
        served = self.request.compare
        if served is None or self.seq is None:
            return range(0)
        return range(max(self.n_live, served.start), min(self.n_live + self.n_in_batch, served.end))

    @property
    def n_in_batch(self) -> int:
        return len(self.in_batch)

    @property
    def n(self) -> int:
        """Tokens of prompt and reply so far."""
        return len(self.ids)

    rank: ClassVar = 0
    """See `Holder.rank`."""

    def n_visible(self, scope: str) -> int:
        """See `Holder.n_visible`."""
        return self.n if self.request.scope == scope else 0

    @property
    def n_cells(self) -> int:
        """Cells that its tokens so far need."""
        return self.request.live.n_cells(self.n)

    @property
    def n_live(self) -> int:
        """Tokens whose rows are in the context."""
        return self.seq.n if self.seq is not None else 0

    @property
    def n_unmoved(self) -> int:
        """Leading tokens that are neither moved nor computed from moved ones, now or later."""
        seq, moves = self.seq, self.moves
        if seq is not None and (n := seq.n_unmoved()) < seq.n:
            return n
        return self.n if moves is None or moves.p0 is None else moves.p0

    @property
    def n_had(self) -> int:
        """Tokens whose rows are in the context, or were before it was preempted."""
        return self.n_live if self.saved is None else self.saved.n

    @property
    def n_to_evaluate(self) -> int:
        """Tokens up to the next moved piece, medium, state checkpoint or eviction, or the end."""
        stop = None if self.moves is None else self.moves.p0
        stop = self.n if stop is None else stop
        stop = min((start for start, _ in self.media if self.n_live <= start < stop), default=stop)
        n = (
            min((p for p in self.checkpoints_at if self.n_live < p < stop), default=stop)
            - self.n_live
        )
        return n if self.seq is None else self.seq.live_set.n_evaluable(n)

    def awaits(self, load: int) -> bool:
        """Whether what load number `load` brings is wanted: the job did not end, and was not preempted,
        since it began."""
        return self.phase is JobPhase.LOADING and load == self.loads and not self.cancelled

    @property
    def is_at_piece(self) -> bool:
        """Whether the next tokens are not evaluated: their rows are moved here."""
        return self.moves is not None and self.moves.p0 == self.n_live

    def n_on_path(self, n: int) -> int:
        """How many of its first `n` tokens are the request's own, which `path` follows."""
        own = self.request.ids
        return min(n, common_prefix(self.ids, own) if self.truncated else len(own))

    def medium_at(self, n: int) -> Span | None:
        """The medium that begins at token `n`."""
        return next((span for span in self.media if span[0] == n), None)

    def push(self, token: int) -> None:
        """Append a sampled token; it still has to be decoded."""
        n = len(self.ids)
        if self.ids.base is not self._room or n == len(self._room):
            self._room = np.empty(n + max(_ROOM_MIN, n // 8), np.int32)
            self._room[:n] = self.ids
        self._room[n] = token
        self.ids = self._room[: n + 1]
        self.reply.append(token)

    def n_cells_wanted(self, n_ctx: int, n_reply: int, n_held: int, n_known: int) -> int:
        """Cells for its tokens so far and up to `n_reply` more, which the reply may still get. Its first
        `n_known` tokens hold or will hold `n_held` cells. A chat with a budget keeps to it behind its
        prompt."""
        n_left = self.n_reply_max(n_ctx) - len(self.reply) if self.request.n_predict else 0
        n_prompt = min(n_ctx, n_held + max(0, self.n_prompt - n_known))
        n_all = min(n_ctx, n_held + self.n - n_known + max(0, min(n_reply, n_left)))
        return max(n_prompt, self.request.live.n_cells(n_all))

    def n_reply_max(self, n_ctx: int) -> int:
        """The most tokens of the reply. If a chat may outgrow its context, a model that never ends
        would generate for ever: a reply is at most one context long."""
        return self.request.n_predict if self.request.n_predict > 0 else n_ctx

    def capacity(self, n_ctx: int) -> int:
        """Tokens that its sequence may come to hold."""
        n_predict = self.request.n_predict
        limit = n_ctx if n_predict < 0 else min(n_ctx, self.n_prompt + n_predict + 1)
        return max(limit, self.n)

    def progress(self) -> Progress:
        cached = self.reuse.live + self.reuse.hot + self.reuse.warm
        elapsed_ms = (time.monotonic() - self.t_prompt) * 1e3
        return Progress(self.n_prompt, cached, self.n_live, elapsed_ms)

    def started(self) -> Started:
        return Started(self.reuse, self.n_prompt, (self.t_first - self.t_prompt) * 1e3)

    def view(self, n_ctx: int) -> SlotView:
        """What GET /slots says of it; may be called by any thread."""
        n_predict, runs = self.request.n_predict, self.phase is not JobPhase.DONE
        cached = self.reuse.live + self.reuse.hot + self.reuse.warm
        first, n_decoded = self.t_first, len(self.reply) if runs else 0
        return SlotView(
            id=self.slot,
            n_ctx=n_ctx,
            is_processing=runs,
            session=self.request.session,
            n_tokens=self.n,
            n_decoded=n_decoded,
            request=None if self.output is None else self.output.request,
            scope=self.request.scope,
            id_task=self.task,
            n_prompt_processed=max(0, min(self.n_live, self.n_prompt) - cached),
            n_prompt_cached=cached,
            n_remain=n_predict - len(self.reply) if runs and n_predict >= 0 else -1,
            has_next_token=runs,
            has_new_line=self.output is not None and self.output.has_new_line,
            ttft_s=first - self.t_submit if runs and first else None,
            tokens_per_second=tokens_per_second(n_decoded, time.monotonic() - first),
        )

    def finish(self, stop: StopType, word: str, n_kept: int) -> Finish:
        """The closing event; `n_kept` reply tokens had all their text sent."""
        now = time.monotonic()
        first = self.t_first or now
        prompt_s = (first - self.t_prompt) if self.t_prompt else 0.0
        cached = self.reuse.live + self.reuse.hot + self.reuse.warm
        timings = Timings(
            cache_n=cached,
            prompt_n=self.reuse.prefill,  # n_prompt shrinks when the context shifts
            prompt_ms=prompt_s * 1e3,
            predicted_n=len(self.reply),
            predicted_ms=(now - first) * 1e3 if self.t_first else 0.0,
        )
        n_cached = min(self.n_had, self.n_prompt + n_kept)
        if self.truncated:  # the live tokens are not a prefix of the conversation's
            n_cached = len(self.request.ids) + max(0, n_kept - 1)
        if self.served is not None:
            self.served.cut(n_kept)
        return Finish(
            stop=stop,
            stopping_word=word,
            ids=tuple(self.reply[:n_kept]),
            n_cached=n_cached,
            timings=timings,
            reuse=self.reuse,
            truncated=self.truncated or self.is_full or self._is_partial,
            n_rows=self._n_rows(),
            slot=self.slot,
            served=self.served,
        )

    @property
    def _is_partial(self) -> bool:
        """Whether a policy took tokens out of the live context."""
        return self.seq is not None and self.seq.is_partial

    def _n_rows(self) -> int | None:
        """See `Finish.n_rows`."""
        if self.truncated:
            return self.n_on_path(self.n)
        return None if self.seq is None else self.seq.live_set.n_storable
