"""Batching: fills the next batch with every running stream's token first, then prompt chunks.

A prompt chunk delays the running streams by its own compute time, so while streams run its size
follows from the measured prefill speed and a time bound; alone, a prompt gets whole batches.
A batch is evaluated under one set of LoRA adapters; jobs under other sets take turns.
"""

from __future__ import annotations

import numpy as np

from towerd.engine.embedded.context.adapters import Adapted
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.run.background import STEP_MS_MAX, is_background

CHUNK_MS_MAX = 250.0
"""How long one prompt chunk may hold up the streams that run beside it."""
_CHUNK_TOKENS_MIN = 16


class Batching:
    """Fills the context's batch from the active jobs."""

    def __init__(self, context: LlamaContext, *, is_even: bool = False) -> None:
        """is_even: whether a batch has as many tokens of each sequence. llama.cpp evaluates others in
        parts if a model has a state, and of a tensor that is tapped the last part is left."""
        self._batch = context.batch
        self._is_even = is_even
        self._streamed = False
        """Whether the last batch had the tokens of streams, and none of a prompt."""
        self._tokens_max = len(context.batch.token)
        self._prefill_token_s = 0.0
        self._adapted: Adapted = ()
        """The adapters of the last batch."""

    def fill(self, active: list[Job]) -> list[Job]:
        """Put the next step into the batch; returns the jobs that take part.

        Sets `in_batch` and `logits_index` (-1: no logits asked) of each, and cuts its `draft` to
        the room that there is."""
        self._batch.clear()
        active = self._next_in_turn(active)
        streams = [j for j in active if j.phase is JobPhase.DECODE][: self._tokens_max]
        prompts = [j for j in active if _is_prompt(j)]
        # Shortest first: each gets an even share, and what a short prompt leaves goes to the next.
        prompts.sort(key=lambda j: j.n_to_evaluate)
        if self._is_even:
            streams, prompts = self._one_kind(streams, prompts)
        for i, job in enumerate(streams, 1):
            room = self._tokens_max - self._batch.n - (len(streams) - i)
            n = min(job.n - job.n_live, room)
            job.draft = job.draft[: room - n]
            self._add(job, n)
        budget = self._tokens_max - self._batch.n
        if any(j.phase is JobPhase.DECODE for j in active):
            budget = min(budget, self._chunk_tokens(CHUNK_MS_MAX))
        if any(is_background(j) for j in active):
            budget = min(budget, self._chunk_tokens(STEP_MS_MAX))
        taken = []
        for i, job in enumerate(prompts):
            share = min(job.n_to_evaluate, budget // (len(prompts) - i))
            if share > 0:
                self._add(job, share)
                taken.append(job)
                budget -= share
        return streams + taken

    def _one_kind(self, streams: list[Job], prompts: list[Job]) -> tuple[list[Job], list[Job]]:
        """The streams, without drafts, or a prompt, in turn."""
        self._streamed = bool(streams) and not (prompts and self._streamed)
        if not self._streamed:
            return [], prompts[:1]
        for job in streams:
            job.draft = job.draft[:0]
        return streams, []

    def _next_in_turn(self, active: list[Job]) -> list[Job]:
        """The jobs that can run under one set of adapters, the next one in turn."""
        ready = [j for j in active if j.phase is JobPhase.DECODE or _is_prompt(j)]
        choices = sorted({job.adapted for job in ready})
        if choices:
            later = (each for each in choices if each > self._adapted)
            self._adapted = next(later, choices[0])
        return [job for job in ready if job.adapted == self._adapted]

    def learn(self, n_tokens: int, seconds: float) -> None:
        """Keep a running estimate of the prefill time of one token."""
        if n_tokens >= _CHUNK_TOKENS_MIN:
            sample = seconds / n_tokens
            previous = self._prefill_token_s or sample
            self._prefill_token_s = 0.7 * previous + 0.3 * sample

    def _chunk_tokens(self, ms_max: float) -> int:
        if not self._prefill_token_s:
            return 4 * _CHUNK_TOKENS_MIN
        return max(_CHUNK_TOKENS_MIN, int(ms_max / 1e3 / self._prefill_token_s))

    def _add(self, job: Job, n: int) -> None:
        assert job.seq is not None
        start = job.seq.n
        last = start + n == job.n
        ids, place = job.ids[start : start + n], job.seq.place_next
        n_draft = len(job.draft) if last else 0
        if n_draft:
            ids = np.concatenate([ids, job.draft])
        index = self._batch.add(ids, place, job.seq.id, logits_last=last, n_last=1 + n_draft)
        job.in_batch = ids
        job.batch_index = index + 1 - len(ids)
        for position in job.compared:
            self._batch.logits[job.batch_index + position - start] = 1
        job.logits_index = index - n_draft if last else -1


def _is_prompt(job: Job) -> bool:
    return job.phase is JobPhase.PREFILL and job.n_to_evaluate > 0
