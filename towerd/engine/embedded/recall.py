"""Recaller: chooses anew what is live of a chat, of all that it ever held.

A policy with an index (IceCache) is asked at three times: when the budget is full, at the end of a
prompt by what its last tokens look for, and again while the reply is generated. Before, what is
live is copied to the chat's shelf; then what the policy does not want leaves the context and what
it misses is appended to it from the shelf, at the places it had. Called by the inference thread
only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from towerd.engine.embedded.core import Core
from towerd.engine.embedded.indexing import Indexer
from towerd.engine.embedded.job import Job, Phase
from towerd.engine.embedded.keys import keys_of
from towerd.engine.embedded.observer import Observer
from towerd.engine.embedded.pool import LivePool, LiveSeq
from towerd.engine.embedded.retained import Retained
from towerd.engine.embedded.shelf import Chunk, ShelfKeys
from towerd.errors import Unavailable
from towerd.retention import Positions, Recalling, Rows, View
from towerd.retention.icecache import IceCacheConfig
from towerd.retention.layout import cluster_order
from towerd.slots.blob import emit_blob
from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows
from towerd.slots.shift import shift

ASKED_AGAIN_TOKENS = 16
"""Of a prompt's last tokens, those that are evaluated again after the recall, so that they see what
they looked for."""
ASKING_TOKENS_MAX = 16
"""Of the observed tokens, the last ones whose queries are searched for: 0.1 ms for each in each
tree, and a model of 32 heads whose every third layer is indexed has 160 of them for each token."""
_KEYS_MAX = 64
"""Nearest keys that a query looks for; a search takes longer the more it looks for."""
_STAYS_SHARE = 0.75
"""Of the positions that fit a shelf, those that are left when it was full."""
_LAYOUT_LAYER_STEP = 4
"""Every so manieth layer's keys say which positions are similar."""


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
    """RAM for the rows and the index of one chat; those of its budget are always kept."""


def served(config: IceCacheConfig, limits: RecallLimits) -> IceCacheConfig:
    """`config` as chats that somebody waits for have it."""
    keys_max = min(config.keys_max, _KEYS_MAX)
    n_threads = limits.n_threads
    return replace(config, layer_step=limits.layer_step, keys_max=keys_max, n_threads=n_threads)


class Recaller:
    """The choices of one engine's chats."""

    def __init__(
        self, core: Core, pool: LivePool, observer: Observer, limits: RecallLimits
    ) -> None:
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
        self._indexer = Indexer(observer.attention.head_size, limits.n_threads)

    def close(self) -> None:
        """End the threads."""
        self._indexer.close()

    def indexing(self, jobs: Iterable[Job]) -> AbstractContextManager[None]:
        """While the batch of `jobs` is evaluated, what has left the windows of chats that evaluate
        their prompts is indexed. Their accounts must be left alone until then."""
        chats: list[tuple[Retained, int]] = []
        for job in jobs:
            retained = None if job.seq is None else job.seq.retained
            if retained is None or not retained.can_recall or job.phase is not Phase.PREFILL:
                continue
            n = job.n_live + job.n_in_batch
            if not job.was_asked:
                n = min(n, job.n_prompt - ASKED_AGAIN_TOKENS)
            if n > retained.shelf.end > 0 and retained.failure is None:
                chats.append((retained, n - retained.shelf.end))
        return self._indexer.beside(chats)

    def n_ahead(self, job: Job, retained: Retained) -> int:
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

    def is_due(self, job: Job, retained: Retained) -> bool:
        """Whether enough was generated since the last choice that another is due."""
        every = self._limits.every_tokens
        if not every or job.phase is not Phase.DECODE or not retained.is_thinned:
            return False
        return retained.n - retained.n_chosen >= every

    def choose(
        self, seq: LiveSeq, retained: Retained, asking: Rows, evict: Callable[[], bool]
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
        self._forget(retained, policy)
        stay = self._chosen(retained, policy, asking)
        back = np.setdiff1d(stay, retained.kept, assume_unique=True)
        n_dropped = self._pool.thin(seq, stay)
        self._bring_back(seq, retained, back, evict)
        retained.n_chosen = retained.n
        self.n_choices += 1
        self.choose_s += time.perf_counter() - started
        return n_dropped

    def recall(self, seq: LiveSeq, retained: Retained, positions: Positions) -> None:
        """Make `positions`, which are on the shelf and not live, live again. Needs their cells."""
        rows = retained.shelf.rows(positions)
        blob = np.asarray(emit_blob([rows], v_trans=self._core.context.v_trans))
        self._memory.append(seq.id, blob, is_empty=not len(retained.kept))
        self._pool.recall(seq, positions, rows.positions.astype(np.int64))
        self.n_tokens_recalled += len(positions)
        self.n_reads += retained.shelf.n_reads(positions)

    def move_down(
        self, seq: LiveSeq, retained: Retained, rope: Rope, evict: Callable[[], bool]
    ) -> None:
        """At the context's end: what stands in the first half of its places, but for the sink, is
        forgotten, and all the rest, live or not, moves down there, its keys rotated. Distances
        stay what they were, so what is not live can still come back.

        Raises Unavailable when no cells can be had."""
        self._shelve(seq, retained)
        shelf, sink = retained.shelf, retained.sink
        is_left = shelf.places(shelf.positions) >= retained.n_places // 2
        left = np.setdiff1d(shelf.positions[is_left], sink, assume_unique=True)
        rot_k = self._core.info.fingerprint.rot_k
        rows = shift(shelf.rows(left), len(sink), rope, rot_k=rot_k)
        chunk = self._laid_out(rows, left, np.arange(len(left)))
        self._pool.let_go(seq)
        retained.moved_down(shelf.only(sink).add(chunk))
        while self._pool.cells_free < len(retained.kept):  # others share what was let go of
            if not evict():
                raise Unavailable("The live context is full of running requests; try again later.")
        live = retained.shelf.rows(retained.kept)
        blob = np.asarray(emit_blob([live], v_trans=self._core.context.v_trans))
        self._memory.append(seq.id, blob, is_empty=True)
        self._pool.take(seq, len(retained.kept))

    def _bring_back(
        self, seq: LiveSeq, retained: Retained, back: Positions, evict: Callable[[], bool]
    ) -> None:
        while self._pool.cells_free < len(back) and evict():
            pass
        back = back[max(0, len(back) - self._pool.cells_free) :]
        if len(back):
            self.recall(seq, retained, back)

    def _chosen(self, retained: Retained, policy: Recalling, asking: Rows) -> Positions:
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

    def _shelve(self, seq: LiveSeq, retained: Retained) -> None:
        """Copy what is live and not on the shelf to it."""
        is_new = ~np.isin(retained.kept, retained.shelf.positions)
        if not is_new.any():
            return
        first = int(is_new.argmax())
        rows = self._memory.rows(seq.id, int(retained.places[first]), retained.place_next)
        assert rows is not None
        numbers = np.flatnonzero(is_new[first:])
        chunk = self._laid_out(rows, retained.kept[first:], numbers)
        retained.shelf = retained.shelf.add(chunk)

    def _laid_out(self, rows: KVRows, positions: Positions, numbers: Positions) -> Chunk:
        """Those of `rows`, similar ones side by side; `positions` of the chat are those of all."""
        keys = keys_of(rows, self._observer.attention.head_size, _LAYOUT_LAYER_STEP)
        return Chunk.of(rows, positions, numbers[cluster_order(keys[:, :, numbers])])

    def _forget(self, retained: Retained, policy: Recalling) -> None:
        """Keep the shelf and the index within their bytes: the oldest that is not live goes."""
        n_max = self.n_max(retained, policy)
        shelf = retained.shelf
        if len(shelf) <= n_max:
            return
        n_over = len(shelf) - max(int(_STAYS_SHARE * n_max), len(retained.kept))
        gone = np.setdiff1d(shelf.positions, retained.kept, assume_unique=True)[:n_over]
        policy.forget(gone)
        retained.shelf = shelf.only(np.setdiff1d(shelf.positions, gone, assume_unique=True))

    def n_max(self, retained: Retained, policy: Recalling) -> int:
        """The most positions that a shelf has room for."""
        layout, size = self._core.layout, self._observer.attention.head_size
        n_kv = layout.k[0].n_elements // size
        token_bytes = layout.token_bytes + policy.index_bytes(layout.n_layer, n_kv, size)
        return max(retained.budget.tokens, self._limits.bytes_max // token_bytes)

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
