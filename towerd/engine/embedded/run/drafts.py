"""Drafts: where guesses come from, which llama.cpp makes from text or from the model's hidden states.

A draft model and n-grams read a reply's text. A head (MTP, EAGLE-3, DFlash) reads what the model
evaluates: each token beside hidden states of the model. Its own rows are in a context of its own, whose
sequences are shared and cut as the model's are, and they are stored and restored with the model's. Where
rows come without them, the head drafts from the tokens that were evaluated since.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from towerd.engine.embedded.context.core import Core, on_short_lived_thread
from towerd.engine.embedded.context.head_memory import open_head_memory
from towerd.engine.embedded.context.sequences import Sequences
from towerd.engine.embedded.live.job import Job
from towerd.errors import ConfigError, ModelError
from towerd.media_ids import is_token
from towerd.model.model_file import Memo, file_hash
from towerd.settings.config import Config
from towerd.settings.llama_flags import draft_model
from towerd.slots.kind import WHOLE
from towerd.tokens import Ids
from towerd.wire import Head, Model, Speculation


class Drafts(Protocol):
    """Methods raise WireError."""

    synthetic: tuple[float, ...]
    """The probabilities with which drafted tokens are taken, right or not; empty: where they are right."""
    head: Head | None
    """What reads the hidden states that are evaluated."""

    def evaluated(self) -> None:
        """Read the batch that the context has just evaluated."""

    def draft(self, asked: Sequence[tuple[Job, int]]) -> list[Ids]:
        """A draft, possibly empty, for each (job, the most tokens to draft)."""

    def accept(self, job: Job, n_accepted: int) -> None:
        """How many tokens of the job's last draft were right."""

    def close(self) -> None:
        """Free what drafts are made with. Before the context is freed."""


class TextDrafts:
    """From a draft model, from n-grams, or both."""

    def __init__(self, speculation: Speculation) -> None:
        self.synthetic = speculation.synthetic
        self.head: Head | None = None
        self._speculation = speculation

    def evaluated(self) -> None:
        """See Drafts. The text says it all."""

    def draft(self, asked: Sequence[tuple[Job, int]]) -> list[Ids]:
        """See Drafts."""
        return self._speculation.draft([(job.slot, _text_of(job), n) for job, n in asked])

    def accept(self, job: Job, n_accepted: int) -> None:
        """See Drafts."""
        self._speculation.accept(job.slot, n_accepted)

    def close(self) -> None:
        """See Drafts."""
        del self._speculation


class HeadDrafts:
    """From a head that reads hidden states."""

    def __init__(self, head: Head, core: Core, weights: str) -> None:
        """weights: a hash of those that the head's rows depend on. Computes: on a thread that ends with
        it."""
        self.synthetic = head.synthetic
        self.head: Head | None = head
        self._head = head
        self._context = core.context
        self._memory = core.memory
        address = head.followed_context
        follower = Sequences(ctypes.c_void_p(address)) if address else None
        core.context.lead(follower, head.changed)
        if follower is not None and core.memory.kind.has_rows:
            core.memory.head = open_head_memory(
                core.context, core.memory.scratch, follower, self.evaluated, weights, head.lag
            )

    def evaluated(self) -> None:
        """See Drafts."""
        self._head.follow(*self._context.evaluated)

    def draft(self, asked: Sequence[tuple[Job, int]]) -> list[Ids]:
        """See Drafts."""
        wanted = []
        for job, n in asked:
            assert job.seq is not None
            wanted.append((job.seq.id, int(job.ids[-1]), job.seq.place_next, n))
        return self._head.draft(wanted)

    def accept(self, job: Job, n_accepted: int) -> None:
        """See Drafts."""
        assert job.seq is not None
        self._head.accept(job.seq.id, n_accepted)

    def close(self) -> None:
        """See Drafts."""
        self._memory.head = None
        self._context.leave()
        self.head = None
        del self._head


def _text_of(job: Job) -> Ids:
    """Its tokens, without its media."""
    return job.ids[is_token(job.ids)] if job.media else job.ids


def open_drafts(model: Model, core: Core, config: Config, memo: Memo) -> Drafts | None:
    """The drafts that llama-server's flags ask for; None if they do not. `memo` remembers the hash of a
    head's file. Raises ConfigError for a model whose state cannot be restored, an unusable draft model
    or head, or clashing flags."""
    if not Speculation.is_asked_for(model):
        return None
    if core.memory.kind is WHOLE:
        raise ConfigError(
            "This model's state can only be kept whole, but speculation has to remove parts "
            "of it: leave out --spec-type and --model-draft."
        )
    address = core.context.address
    try:
        if Head.is_asked_for(model):
            flags = core.context.params
            made = model, address, ctypes.addressof(flags), config.parallel, str(core.model.path)
            weights = _weights_of_head(core, config, memo)
            return on_short_lived_thread(lambda: HeadDrafts(Head(*made), core, weights))
        n_threads = config.threads, config.threads_batch or config.threads
        read = model, address, config.parallel, *n_threads
        return TextDrafts(on_short_lived_thread(lambda: Speculation(*read)))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"No speculation: {error}.") from error


def _weights_of_head(core: Core, config: Config, memo: Memo) -> str:
    """A hash of the weights that the rows of a head are computed with, besides those of the model."""
    path = draft_model(config.llama_server_args)
    if not path:
        return core.info.row_identity.model_hash
    try:
        return file_hash(Path(path), memo)
    except ModelError as error:
        raise ConfigError(f"No speculation: {error}") from error
