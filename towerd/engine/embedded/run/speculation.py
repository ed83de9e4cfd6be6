"""Speculation: tokens that a draft model or n-grams guess are evaluated beside the newest one.

The model's own samples decide: a reply gets the drafted tokens that it would have sampled anyway,
and the one after them. The rows of the others are dropped at once. A memory whose state cannot be
cut is restored to the state before the draft, and evaluates the accepted tokens again with the
next step.

A draft model reads a prompt after the first token of the reply was sent, a few tokens in each step,
and only the end of a long one: it never delays a resumed chat (`towerd/wire/cpp/speculation.cpp`). A head
reads what is evaluated, with each step (`towerd/wire/cpp/head.cpp`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from towerd.engine.embedded.context.memory import SequenceMemory
from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.live.pool import LivePool
from towerd.engine.embedded.run.batching import Batching
from towerd.engine.embedded.run.drafts import Drafts
from towerd.wire import Chunk, Head, WireError

log = logging.getLogger(__name__)

_NOTHING = np.empty(0, np.int32)


class Speculator:
    """Drafts for the running requests of one context. Called by the inference thread only."""

    def __init__(
        self, drafts: Drafts | None, memory: SequenceMemory, pool: LivePool, n_ctx: int
    ) -> None:
        """drafts: the source of drafts; None: there are none"""
        self.n_drafts = 0
        """Drafts that were evaluated."""
        self.n_tokens = 0
        self.n_accepted = 0
        self.n_accepted_at: list[int] = []
        """How many drafted tokens were accepted at each place of a draft."""
        self._drafts = drafts
        self._memory = memory
        self._pool = pool
        self._n_ctx = n_ctx

    @property
    def is_on(self) -> bool:
        """Whether there are drafts; may be asked by any thread."""
        return self._drafts is not None

    @property
    def head(self) -> Head | None:
        """What reads the hidden states of media that are evaluated; None: nothing does."""
        return None if self._drafts is None else self._drafts.head

    def fill(self, batching: Batching, active: list[Job], evict: Callable[[], bool]) -> list[Job]:
        """Put the next step into the batch, with drafts; returns the jobs that take part. Idle
        sequences are evicted for drafts, running requests are not preempted for them."""
        self._draft(active)
        jobs = batching.fill(active)
        while self._pool.cells_free < sum(job.n_in_batch for job in jobs):
            if not evict():
                for job in active:
                    job.draft = _NOTHING
                return batching.fill(active)
        return jobs

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Before the batch of `jobs` is decoded, save the states that a wrong draft must not
        change."""
        for job in jobs:
            job.undo = None
            if len(job.draft) and self._memory.kind.has_state:
                assert job.seq is not None
                job.undo = (job.seq.n, self._memory.snapshot(job.seq.id))

    def evaluated(self) -> None:
        """After a batch was decoded, have a head read it."""
        if self._drafts is not None:
            try:
                self._drafts.evaluated()
            except WireError:
                self._give_up()

    def sample(self, job: Job, context: int, *, may_outgrow: bool) -> list[Chunk]:
        """Sample the next tokens of the job's reply, at least one; rejected tokens of its draft
        leave the context. may_outgrow: whether the chat may outgrow the context. Raises
        TowerdError."""
        assert job.output is not None
        n_room = len(job.draft) + 1 if may_outgrow else self._n_ctx - 1 - job.n
        synthetic = () if self._drafts is None else self._drafts.synthetic
        chunks = job.output.steps(context, job.logits_index, job.draft, n_room, synthetic)
        draft, job.draft = job.draft, _NOTHING
        if len(draft):
            self._settle(job, len(draft), len(chunks) - 1)
        return chunks

    def close(self) -> None:
        """Free a draft model or a head. No request may run any more."""
        drafts, self._drafts = self._drafts, None
        if drafts is not None:
            drafts.close()

    def _give_up(self) -> None:
        log.exception("speculation failed; replies continue without it")
        self.close()

    def _draft(self, active: Sequence[Job]) -> None:
        """Set each job's `draft`."""
        if self._drafts is None:
            return
        asked = []
        for job in active:
            job.draft = _NOTHING
            if (n := self._n_max(job)) > 0:
                asked.append((job, n))
        if not asked:
            return
        try:
            drafts = self._drafts.draft(asked)
        except WireError:
            self._give_up()
            return
        for (job, _), draft in zip(asked, drafts, strict=True):
            job.draft = draft

    def _settle(self, job: Job, n_draft: int, n_right: int) -> None:
        """Drop all but the first `n_right` tokens of the job's draft."""
        self._count(n_draft, n_right)
        if self._drafts is not None:
            try:
                self._drafts.accept(job, n_right)
            except WireError:
                self._give_up()
        seq, undo, job.undo = job.seq, job.undo, None
        assert seq is not None
        if n_right == n_draft:
            return
        n = seq.n - (n_draft - n_right)
        if undo is not None:
            n, state = undo
            self._memory.restore(seq.id, state)
        self._pool.truncate(seq, n)

    def _n_max(self, job: Job) -> int:
        """The most drafted tokens that the job's reply, its sequence and the context have room
        for."""
        seq, output = job.seq, job.output
        if job.phase is not JobPhase.DECODE or seq is None or output is None or job.slot < 0:
            return 0
        if job.request.live.is_bounded or job.n - seq.n != 1:
            return 0
        n_reply = job.n_reply_max(self._n_ctx) - len(job.reply)
        return min(n_reply - 1, self._n_ctx - job.n - 2, len(seq.ids) - seq.n - 1)

    def _count(self, n_tokens: int, n_right: int) -> None:
        self.n_drafts += 1
        self.n_tokens += n_tokens
        self.n_accepted += n_right
        self.n_accepted_at += [0] * (n_tokens - len(self.n_accepted_at))
        for place in range(n_right):
            self.n_accepted_at[place] += 1

    def stats(self) -> dict[str, int | list[int]]:
        return {
            "drafts": self.n_drafts,
            "draft_tokens": self.n_tokens,
            "draft_tokens_accepted": self.n_accepted,
            "draft_tokens_accepted_at": list(self.n_accepted_at),
        }
