"""Recaller: chooses anew what is live of a chat, of all that it ever held.

A policy with an index (IceCache) is asked at three times: when the budget is full, at the end of a
prompt by what its last tokens look for, and again while the reply is generated. Before, what is
live is copied to the chat's shelf; then what the policy does not want leaves the context and what
it misses is appended to it from the shelf, at the places it had. Called by the inference thread
only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from towerd.engine.embedded.longchat.indexing import Indexer
from towerd.engine.embedded.longchat.live_set import BoundedSet
from towerd.engine.embedded.longchat.observer import Observer
from towerd.engine.embedded.longchat.pages import PagesLost
from towerd.engine.embedded.longchat.room import Room
from towerd.engine.embedded.longchat.shelf import ShelfKeys
from towerd.engine.embedded.model.core import Core
from towerd.engine.embedded.scheduling.job import Job, Phase
from towerd.engine.embedded.scheduling.pool import LivePool, LiveSeq
from towerd.errors import Unavailable
from towerd.retention import Positions, Recalling, RetentionConfig, Rows, View
from towerd.slots.blob import emit_blob
from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows
from towerd.slots.shift import shift

log = logging.getLogger(__name__)

ASKED_AGAIN_TOKENS = 16
"""Of a prompt's last tokens, those that are evaluated again after the recall, so that they see what
they looked for."""
ASKING_TOKENS_MAX = 16
"""Of the observed tokens, the last ones whose queries are searched for: 0.1 ms for each in each
tree, and a model of 32 heads whose every third layer is indexed has 160 of them for each token."""
_FOLLOWERS = 7
"""What follows a position comes back with it: the next token of a reply continues there, and is
sampled before anybody chooses again."""
_KEYS_MAX = 64
"""Nearest keys that a query looks for; a search takes longer the more it looks for."""


@dataclass(frozen=True, slots=True)
class RecallLimits:
    """The settings of chats that can recall."""

    every_tokens: int
    """Generated tokens between choices; 0: none while a reply is generated."""
    layer_step: int
    """Every so manieth layer is indexed."""
    n_threads: int
    """Of a choice."""
    bytes_max: int
    """RAM for the rows and the index of one chat."""
    disk_bytes_max: int
    """Disk for the rows of one chat."""


def served(config: RetentionConfig, limits: RecallLimits) -> RetentionConfig:
    """`config` as chats that somebody waits for have it."""
    from towerd.retention.icecache import IceCacheConfig

    if not isinstance(config, IceCacheConfig):
        return config
    keys_max = min(config.keys_max, _KEYS_MAX)
    n_threads = limits.n_threads
    return replace(
        config, layer_step=limits.layer_step, keys_max=keys_max, n_threads=n_threads,
        followers=_FOLLOWERS,
    )  # fmt: skip


class Recaller:
    """The choices of one engine's chats."""

    def __init__(
        self,
        core: Core,
        pool: LivePool,
        observer: Observer,
        limits: RecallLimits,
        folder: Path,
    ) -> None:
        """folder: of the files with rows that RAM has no room for"""
        self.n_choices = 0
        self.n_tokens_recalled = 0
        self.n_reads = 0
        """Contiguous pieces of shelves that these were read from."""
        self.choose_s = 0.0
        """What choices took altogether, with what they had to index themselves."""
        self._core = core
        self._memory = core.memory
        self._pool = pool
        self._observer = observer
        self._limits = limits
        size, sizes = observer.attention.head_size, (limits.bytes_max, limits.disk_bytes_max)
        self.room = Room(core.layout, size, *sizes, folder)
        self._indexer = Indexer(observer.attention.head_size, limits.n_threads)

    def close(self) -> None:
        """End the threads."""
        self._indexer.close()

    def indexing(self, jobs: Iterable[Job]) -> AbstractContextManager[None]:
        """While the batch of `jobs` is evaluated, what has left the windows of chats that evaluate
        their prompts is indexed. Their accounts must be left alone until then."""
        chats: list[tuple[BoundedSet, int]] = []
        for job in jobs:
            retained = None if job.seq is None else job.seq.live_set
            if not isinstance(retained, BoundedSet) or not retained.can_recall:
                continue
            if job.phase is not Phase.PREFILL:
                continue
            n = job.n_live + job.n_in_batch
            if not job.was_asked:
                n = min(n, job.n_prompt - ASKED_AGAIN_TOKENS)
            if n > retained.shelf.end > 0 and retained.failure is None:
                chats.append((retained, n - retained.shelf.end))
        return self._indexer.beside(chats)

    def n_ahead(self, job: Job, retained: BoundedSet) -> int:
        """How many tokens can be evaluated before the next choice."""
        ahead = retained.room
        if not retained.is_thinned:
            return ahead
        if not job.was_asked and job.n_live < job.n_prompt:
            ahead = min(ahead, job.n_prompt - job.n_live)
        if self._limits.every_tokens:
            due = max(retained.n_chosen + self._limits.every_tokens, job.n_prompt)
            ahead = min(ahead, due - job.n_live)
        return ahead

    def is_due(self, job: Job, retained: BoundedSet) -> bool:
        """Whether enough was generated since the last choice that another is due."""
        every = self._limits.every_tokens
        if not every or job.phase is not Phase.DECODE or not retained.is_thinned:
            return False
        return retained.n - retained.n_chosen >= every

    def choose(
        self, seq: LiveSeq, retained: BoundedSet, asking: Rows, evict: Callable[[], bool]
    ) -> int:
        """Ask the policy, drop what it does not name and bring back what it does, within the
        budget's target. asking: see `View.queries`. Returns how many positions were dropped.

        `evict` frees an idle sequence; where no cells can be had, less comes back. Raises
        TowerdError if llama.cpp refuses the rows, and what went wrong when the chat was indexed."""
        started = time.perf_counter()
        policy = retained.policy
        assert isinstance(policy, Recalling)
        if retained.failure is not None:
            raise retained.failure
        self._shelve(seq, retained)
        self.room.make(retained)
        try:
            stay = self._chosen(retained, policy, asking)
        except PagesLost as error:
            self._lose_pages(retained, error)
            self._shelve(seq, retained)
            stay = self._chosen(retained, policy, asking)
        back = np.setdiff1d(stay, retained.kept, assume_unique=True)
        n_dropped = self._pool.thin(seq, retained, stay)
        self._bring_back(seq, retained, back, evict)
        self.room.page_out(retained)
        retained.n_chosen = retained.n
        self.n_choices += 1
        self.choose_s += time.perf_counter() - started
        return n_dropped

    def recall(self, seq: LiveSeq, retained: BoundedSet, positions: Positions) -> None:
        """Make `positions`, which are on the shelf and not live, live again, but for those whose
        rows the disk has lost. Needs their cells."""
        positions, rows = self._read(retained, positions)
        if rows is None:
            return
        blob = np.asarray(emit_blob([rows], v_trans=self._core.context.v_trans))
        self._memory.append(seq.id, blob, is_empty=not len(retained.kept))
        self._pool.recall(seq, retained, positions, rows.positions.astype(np.int64))
        self.n_tokens_recalled += len(positions)
        self.n_reads += retained.shelf.n_reads(positions)

    def move_down(
        self, seq: LiveSeq, retained: BoundedSet, rope: Rope, evict: Callable[[], bool]
    ) -> None:
        """At the context's end: what stands in the first half of its places, but for the sink, is
        forgotten, and all the rest, live or not, moves down there, its keys rotated. Distances
        stay what they were, so what is not live can still come back.

        Raises Unavailable when no cells can be had."""
        left, rows = self._second_half(seq, retained)
        sink = retained.sink
        rows = shift(rows, len(sink), rope, rot_k=self._core.info.fingerprint.rot_k)
        chunk = self.room.lay_out(rows, left, np.arange(len(left)))
        self._pool.let_go(seq)
        retained.moved_down(retained.shelf.only(sink).add(chunk))
        while self._pool.cells_free < len(retained.kept):  # others share what was let go of
            if not evict():
                raise Unavailable("The live context is full of running requests; try again later.")
        live = retained.shelf.rows(retained.kept)
        blob = np.asarray(emit_blob([live], v_trans=self._core.context.v_trans))
        self._memory.append(seq.id, blob, is_empty=True)
        self._pool.take(seq, len(retained.kept))

    def _second_half(self, seq: LiveSeq, retained: BoundedSet) -> tuple[Positions, KVRows]:
        """What stands in the second half of the context's places, but for the sink."""
        self._shelve(seq, retained)
        shelf = retained.shelf
        is_left = shelf.places(shelf.positions) >= retained.n_places // 2
        left = np.setdiff1d(shelf.positions[is_left], retained.sink, assume_unique=True)
        try:
            return left, shelf.rows(left)
        except PagesLost as error:
            self._lose_pages(retained, error)
        return self._second_half(seq, retained)  # nothing is on disk any more

    def _bring_back(
        self, seq: LiveSeq, retained: BoundedSet, back: Positions, evict: Callable[[], bool]
    ) -> None:
        while self._pool.cells_free < len(back) and evict():
            pass
        back = back[max(0, len(back) - self._pool.cells_free) :]
        if len(back):
            self.recall(seq, retained, back)

    def _chosen(self, retained: BoundedSet, policy: Recalling, asking: Rows) -> Positions:
        shelf, size = retained.shelf, self._observer.attention.head_size
        self._indexer.index(retained)
        live = np.isin(shelf.positions, retained.kept)
        keys = ShelfKeys(shelf, size)
        view = View(
            shelf.positions,
            retained.n,
            keys=keys,
            queries=asking[:, :, -ASKING_TOKENS_MAX:],
            live=live,
        )
        return policy.keep(view, retained.n_target)

    def _read(self, retained: BoundedSet, positions: Positions) -> tuple[Positions, KVRows | None]:
        """Those of `positions` on the shelf that can be had, with their rows."""
        try:
            return positions, retained.shelf.rows(positions)
        except PagesLost as error:
            self._lose_pages(retained, error)
        left = np.intersect1d(positions, retained.shelf.positions, assume_unique=True)
        return left, retained.shelf.rows(left) if len(left) else None

    def _lose_pages(self, retained: BoundedSet, error: PagesLost) -> None:
        """Forget what is on disk."""
        log.warning("a long chat forgets what is on disk", extra={"reason": str(error)})
        shelf = retained.shelf
        lost = np.setdiff1d(shelf.positions, shelf.in_ram, assume_unique=True)
        self.room.forget(retained, lost)

    def _shelve(self, seq: LiveSeq, retained: BoundedSet) -> None:
        """Copy what is live and not on the shelf to it."""
        is_new = ~np.isin(retained.kept, retained.shelf.positions)
        if not is_new.any():
            return
        first = int(is_new.argmax())
        rows = self._memory.rows(seq.id, int(retained.places[first]), retained.place_next)
        assert rows is not None
        numbers = np.flatnonzero(is_new[first:])
        chunk = self.room.lay_out(rows, retained.kept[first:], numbers)
        retained.shelf = retained.shelf.add(chunk)

    def stats(self) -> dict[str, float]:
        """Counters; times in seconds."""
        return {
            "recall_choices": self.n_choices,
            "recall_tokens": self.n_tokens_recalled,
            "recall_reads": self.n_reads,
            "recall_choose_s": self.choose_s,
            "recall_index_s": self._indexer.index_s,
            "recall_index_beside_s": self._indexer.beside_s,
        }
