"""Recall: chooses the live positions of a chat again, among all that it ever held.

A policy with an index (IceCache) is asked at three times: when the budget is full, at the end of a
prompt by the queries of its last tokens, and repeatedly while the reply is generated. First the
live rows are offloaded (copied to RAM); then the positions that the policy does not choose leave
the context, and the chosen ones that are not live are appended from the offloaded rows, at the
places they had. Called by the inference thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.context.core import Core
from towerd.engine.embedded.context.memory import SequenceMemory
from towerd.engine.embedded.context.sequences import Buffer
from towerd.engine.embedded.live.descent import Descent
from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.live.live_set import BoundedSet, filled
from towerd.engine.embedded.live.offloaded_rows import OffloadedKeys
from towerd.engine.embedded.live.pages import PagesLost
from towerd.engine.embedded.live.pool import LivePool, LiveSeq, broken_by_failure
from towerd.engine.embedded.longchat.observer import Observer
from towerd.engine.embedded.longchat.offload_space import OffloadSpace
from towerd.retention import Positions, Recalling, RetentionConfig, Rows, View, retention_config
from towerd.retention.lexical import passages
from towerd.settings.config import Config
from towerd.slots.rope import Rope
from towerd.tiers.manager import Tiers
from towerd.tokens import Ids, Provenance

log = logging.getLogger(__name__)

T = TypeVar("T")

REEVALUATED_TOKENS = 16
"""Last tokens of a prompt that are evaluated again after the recall, so that they attend to what
they looked for."""
QUERY_TOKENS_MAX = 16
"""Last observed tokens whose queries are searched for: a search takes 0.1 ms in each tree, and a
model with 32 heads of which every third layer is indexed has 160 of them for each token."""
_FOLLOWERS = 7
"""Positions after a chosen one that are recalled with it: the next token of a reply may continue
there, and is sampled before the next choice."""
_ASKED_TOKENS_MAX = 256
"""Tokens of a prompt whose words are looked for."""
_ASKED_SHARE = 4
"""Passages that have these words take at most 1 / _ASKED_SHARE of what is free beside sink and window."""
_PIECE_ROWS = 512
"""Rows that are copied or turned at once; until that is done they are there twice."""
_STORED_MIN = 256
"""Rows for which the store is asked."""
_READ_LAYERS_MIN = 4
"""Layers whose keys are read where only some attend to everything, if there are so many."""
_KEYS_MAX = 64
"""Nearest keys that a query searches for; a search for more takes longer."""


def _shorter(chosen: Positions, n_sink: int, n_max: int) -> Positions:
    """At most `n_max` of the columns, the sink and the latest ones."""
    n_over = max(0, chosen.shape[2] - n_max)
    return np.delete(chosen, np.s_[n_sink : n_sink + n_over], axis=2)


def _labels(rotated: Positions, live_set: BoundedSet) -> Positions:
    """int64[m], ascending: the places that cells are labelled by whose keys are rotated to `rotated`: the
    same, or, where positions share places, those just before the window's."""
    if (np.diff(rotated) > 0).all():
        return rotated
    n_sink, end = len(live_set.sink), len(rotated) - live_set.policy.config.window
    first = int(rotated[end])
    middle = np.arange(first - (end - n_sink), first)
    return np.concatenate([rotated[:n_sink], middle, rotated[end:]])


def full_among_others(memory: SequenceMemory) -> int:
    """The number of layers that attend to everything, in a model where only some do; 0 where all do."""
    n_layer = memory.full_layout.n_layer
    return n_layer if n_layer < memory.layout.n_layer or memory.kind.has_state else 0


def served(budget: LiveBudget, settings: Config, n_among_others: int = 0) -> RetentionConfig:
    """The config of a budget's policy with the limits of chats whose users wait for replies.

    Of `n_among_others` layers that attend to everything among others that do not (`full_among_others`) more are read:
    they are few and far apart, so that one says little of the next, and the model's first two are not among them."""
    from towerd.retention.icecache import IceCacheConfig
    from towerd.retention.latem import LatemConfig

    config = retention_config(budget.policy, budget.tokens)
    step = settings.recall_layer_step
    if n_among_others:
        step = min(step, max(1, n_among_others // _READ_LAYERS_MIN))
    if isinstance(config, LatemConfig):
        return replace(config, layer_step=step, n_threads=settings.threads)
    if not isinstance(config, IceCacheConfig):
        return config
    return replace(
        config,
        layer_first=0 if n_among_others else config.layer_first,
        layer_step=step,
        keys_max=min(config.keys_max, _KEYS_MAX),
        n_threads=settings.threads,
        followers=_FOLLOWERS,
    )


class Indexer:
    """Adds positions that have left a chat's window to the index of its policy.

    A prompt is evaluated in batches. The positions that one batch pushes out of the window are indexed
    on a separate thread while llama.cpp evaluates the next batch: their keys are offloaded by then, and
    no other thread touches the index. The rest is indexed when the policy has to choose."""

    def __init__(self, head_size: int, n_threads: int) -> None:
        """n_threads: threads that index while nothing else runs"""
        self.index_s = 0.0
        """Seconds spent indexing."""
        self.beside_s = 0.0
        """The part of `index_s` that ran beside an evaluation."""
        self._head_size = head_size
        self._n_threads = n_threads
        self._worker = ThreadPoolExecutor(1, "towerd-index")

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown()

    def index(self, live_set: BoundedSet) -> None:
        """Index the offloaded positions of a chat that have left its window."""
        self.index_s += _index(live_set, 0, self._head_size, self._n_threads)

    def run(self, work: Callable[[], T]) -> Future[T] | None:
        """Do something on the thread; None if there is none."""
        try:
            return self._worker.submit(work)
        except RuntimeError:
            return None

    @contextmanager
    def beside(self, chats: Iterable[tuple[BoundedSet, int]]) -> Iterator[None]:
        """Index these (chat, number of further tokens) while the body runs, which must not touch
        them. A failure is noted in the chat's `BoundedSet.failure`."""
        work: list[tuple[BoundedSet, Future[float]]] = []
        try:
            for live_set, n_more in chats:
                future = self._worker.submit(_index, live_set, n_more, self._head_size, 1)
                work.append((live_set, future))
        except RuntimeError as error:  # no thread can be started: the next choice indexes the rest
            log.warning("a prompt is not indexed beside", extra={"reason": str(error)})
        try:
            yield
        finally:
            for live_set, future in work:
                try:
                    seconds = future.result()
                except Exception as error:
                    live_set.failure = error
                else:
                    self.index_s += seconds
                    self.beside_s += seconds


def _index(live_set: BoundedSet, n_more: int, head_size: int, n_threads: int) -> float:
    """Index a chat, and return the seconds that it took."""
    started = time.perf_counter()
    policy, offloaded = live_set.policy, live_set.offloaded
    assert isinstance(policy, Recalling)
    span = policy.indexed(len(offloaded) + n_more)
    span = slice(span.start, min(span.stop, len(offloaded)))
    if len(offloaded):
        keys = OffloadedKeys(offloaded, head_size, span)
        policy.index(offloaded.positions[span], keys, n_threads=n_threads)
    return time.perf_counter() - started


class Recall:
    """Chooses for the chats of one engine."""

    def __init__(
        self,
        core: Core,
        pool: LivePool,
        observer: Observer,
        tiers: Tiers,
        config: Config,
        folder: Path,
    ) -> None:
        """folder: where rows that RAM has no room for are written"""
        self.n_choices = 0
        self.n_tokens_recalled = 0
        self.n_reads = 0
        """Contiguous pieces of offloaded rows that the recalled ones were read from."""
        self.choose_s = 0.0
        """Seconds spent on choices, including what they had to index themselves."""
        self._core = core
        self._memory = core.memory
        self._pool = pool
        self._observer = observer
        self._tiers = tiers
        self._every_tokens = config.recall_every
        """Generated tokens between choices; 0: none while a reply is generated."""
        size, sizes = observer.attention.head_size, (config.recall_bytes, config.recall_disk_bytes)
        store = tiers.store
        is_encrypted = store.vault is not None
        self.space = OffloadSpace(
            core.memory.full_layout, size, *sizes, folder, store.writes, is_encrypted
        )
        store.disk.unnamed_bytes = config.recall_disk_bytes
        self._indexer = Indexer(observer.attention.head_size, config.threads)

    def close(self) -> None:
        """End the threads."""
        self._indexer.close()

    def indexing(self, jobs: Iterable[Job]) -> AbstractContextManager[None]:
        """While the batch of `jobs` is evaluated, index what has left the windows of the chats that
        evaluate their prompts. Their live sets must not change meanwhile."""
        chats: list[tuple[BoundedSet, int]] = []
        for job in jobs:
            live_set = None if job.seq is None else job.seq.live_set
            if not isinstance(live_set, BoundedSet) or not live_set.can_recall:
                continue
            if job.phase is not JobPhase.PREFILL:
                continue
            n = job.n_live + job.n_in_batch
            if not job.was_recalled:
                n = min(n, job.n_prompt - REEVALUATED_TOKENS)
            if n > live_set.offloaded.end > 0 and live_set.failure is None:
                chats.append((live_set, n - live_set.offloaded.end))
        return self._indexer.beside(chats)

    def n_ahead(self, job: Job, live_set: BoundedSet) -> int:
        """How many tokens may be evaluated before the next choice."""
        ahead = live_set.room
        if not live_set.is_partial:
            return ahead
        if not job.was_recalled and job.n_live < job.n_prompt:
            ahead = min(ahead, job.n_prompt - job.n_live)
        if self._every_tokens:
            due = max(live_set.n_chosen + self._every_tokens, job.n_prompt)
            ahead = min(ahead, due - job.n_live)
        return ahead

    def is_due(self, job: Job, live_set: BoundedSet) -> bool:
        """Whether enough tokens were generated since the last choice for another."""
        every = self._every_tokens
        if not every or job.phase is not JobPhase.DECODE or not live_set.is_partial:
            return False
        return live_set.n - live_set.n_chosen >= every

    def choose(
        self,
        seq: LiveSeq,
        live_set: BoundedSet,
        queries: Rows,
        messages: Positions | None,
        evict: Callable[[], bool],
    ) -> int:
        """Ask the policy, evict the positions that it does not choose and recall those that it
        does, within the budget's target. queries: see `View.queries`; messages: int64[n], the message
        of each token of the chat, if the policy uses it. Returns the number of evictions.

        `evict` frees an idle sequence; if cells are short, fewer positions are recalled. Raises
        TowerdError if llama.cpp refuses the rows, and the error of a failed indexing."""
        started = time.perf_counter()
        policy = live_set.policy
        assert isinstance(policy, Recalling)
        if live_set.failure is not None:
            raise live_set.failure
        self.offload(seq, live_set)
        self.space.make(live_set)
        before, n_before = live_set.positions(), len(live_set.kept)
        while True:
            try:
                chosen = self._chosen(live_set, policy, queries, messages)
                stay = live_set.agreed(chosen)
                if stay is not None and np.isin(stay, live_set.kept, assume_unique=True).all():
                    self._pool.evict(seq, live_set, stay)  # nothing comes back
                else:
                    self.put(seq, live_set, chosen, evict)
                break
            except PagesLost as error:
                self._lose_pages(live_set, error)
                self.offload(seq, live_set)
        self._count(live_set, before)
        self.space.make(live_set)
        if live_set.in_store is None or live_set.in_store.done():
            self.space.page_out(live_set)
        live_set.n_chosen = live_set.n
        live_set.mass = np.zeros_like(live_set.mass)
        self.n_choices += 1
        self.choose_s += time.perf_counter() - started
        return max(0, n_before - len(live_set.kept))

    def put(
        self,
        seq: LiveSeq,
        live_set: BoundedSet,
        chosen: Positions,
        evict: Callable[[], bool],
        beside: Buffer | None = None,
    ) -> None:
        """Let these offloaded positions be the live ones of a chat, by group, or as many of them as there
        are cells for. Raises Unavailable and PagesLost, which change nothing.

        chosen: int64[layers, KV heads, m], ascending; beside: see `LivePool.rewrite`"""
        offloaded = live_set.offloaded
        self._pool.has_own(seq, chosen.shape[2], evict)
        n_own, n_ends = self._pool.n_own_cells(seq), live_set.policy.config.n_min
        n_labels = int(offloaded.places(chosen[0, 0, -1:])[0]) + 1
        n_cells = max(n_ends, min(self._pool.cells_free + n_own, n_labels))
        chosen = _shorter(chosen, len(live_set.sink), n_cells)
        rotated = offloaded.places(chosen)
        places = _labels(rotated[0, 0], live_set)
        rows = offloaded.mixed(chosen, places)
        self._pool.rewrite(seq, rows, evict, beside)
        live_set.mix(chosen, rotated, places)

    def _count(self, live_set: BoundedSet, before: Positions) -> None:
        """Count what has come back."""
        after = live_set.positions()
        lines = zip(
            after.reshape(-1, after.shape[2]), before.reshape(-1, before.shape[2]), strict=True
        )
        back = [np.setdiff1d(*each, assume_unique=True) for each in lines]
        self.n_tokens_recalled += sum(map(len, back)) // len(back)
        self.n_reads += live_set.offloaded.n_reads(np.unique(np.concatenate(back)))

    def move_down(
        self, seq: LiveSeq, live_set: BoundedSet, rope: Rope, evict: Callable[[], bool]
    ) -> None:
        """At the end of the context, move the positions in the second half of its places down by half of
        it, live or not, their keys rotated. Those in the first half stay where they are and can still be
        recalled: nearer than they were, beside later ones at the same places.

        Raises Unavailable, which changes nothing, if no cells can be freed. Rows that the disk does not
        give back are forgotten."""
        self._pool.require_own(seq, live_set.policy.config.n_min, evict)
        down = live_set.n_places - live_set.n_places // 2  # none goes down twice
        descent = Descent(down, rope.sections[0], self._core.info.row_identity.rot_k)
        beside = self._memory.moved_beside(seq.id, -down, rope, rot_k=descent.rot_k)
        while True:
            try:
                self.offload(seq, live_set)
                self._lower(live_set, descent)
                positions = live_set.positions()
                is_there = np.isin(positions, live_set.offloaded.positions).all(axis=(0, 1))
                self.put(seq, live_set, positions[:, :, is_there], evict, beside)
                break
            except PagesLost as error:  # nothing is on disk the next time
                self._lose_pages(live_set, error)
        live_set.moved_down()

    def _lower(self, live_set: BoundedSet, descent: Descent) -> None:
        """Turn the keys of the offloaded rows that go down, a piece at a time, of which there are two copies
        then. Those on disk are turned when they are read."""
        policy, offloaded = live_set.policy, live_set.offloaded
        assert isinstance(policy, Recalling)
        layers = policy.layers(self._memory.full_layout.n_layer)
        with broken_by_failure(live_set):
            places = offloaded.places(offloaded.positions)
            policy.forget(offloaded.positions[descent.moves(places)])  # their keys are others now
            while (lowered := live_set.offloaded.lowered(descent, layers, _PIECE_ROWS)) is not None:
                live_set.offloaded = lowered

    def _chosen(
        self,
        live_set: BoundedSet,
        policy: Recalling,
        queries: Rows,
        messages: Positions | None,
    ) -> Positions:
        """int64[layers, KV heads, m]: the positions that the policy wants live."""
        offloaded, size = live_set.offloaded, self._observer.attention.head_size
        self._indexer.index(live_set)
        live = np.isin(offloaded.positions, live_set.kept)
        keys = OffloadedKeys(offloaded, size)
        mass = np.zeros(len(live), np.float32)
        if live_set.mass.size:
            of_live = np.isin(live_set.kept, offloaded.positions)
            mass[live] = live_set.mass.mean(axis=(0, 1))[of_live]
        view = View(
            offloaded.positions,
            live_set.n,
            mass=mass,
            messages=None if messages is None else messages[offloaded.positions],
            keys=keys,
            queries=queries[:, :, -QUERY_TOKENS_MAX:],
            live=live,
        )
        asked = np.intersect1d(live_set.asked, offloaded.positions, assume_unique=True)
        chosen = policy.keep_groups(view, live_set.n_target - len(asked), live_set.shape)
        if not len(asked):
            return chosen
        n = min(chosen.shape[2] + len(asked), len(offloaded))
        lines = chosen.reshape(-1, chosen.shape[2])
        both = [filled(np.union1d(line, asked), offloaded.positions, n) for line in lines]
        return np.stack(both).reshape(*chosen.shape[:2], n)

    def ask(self, live_set: BoundedSet, ids: Ids, n_asked: int) -> None:
        """Note what the words of a prompt's last `n_asked` tokens are about. ids: int32[n], all tokens"""
        room = live_set.n_target - live_set.policy.config.n_min
        n_asked = min(n_asked, _ASKED_TOKENS_MAX)
        live_set.asked = passages(ids, n_asked, room // _ASKED_SHARE)

    def _lose_pages(self, live_set: BoundedSet, error: PagesLost) -> None:
        """Forget the rows on disk."""
        log.warning("a long chat forgets what is on disk", extra={"reason": str(error)})
        self.space.forget(live_set, live_set.offloaded.in_files)

    def offload_read(self, job: Job, seq: LiveSeq, live_set: BoundedSet) -> None:
        """Offload what is there of a prompt at whose end the policy will choose, so that it is indexed
        while the rest is read. If the disk does not take more, the policy chooses when RAM is full."""
        n_end = len(live_set.kept) + job.n_prompt - seq.n
        if job.phase is not JobPhase.PREFILL or n_end < live_set.budget.tokens:
            return
        self.look_up(job, seq, live_set)
        if live_set.in_store is not None and not live_set.in_store.done():
            return  # what the store has is not copied
        self.refer(live_set)
        while self._offload_piece(seq, live_set):
            self.space.make(live_set)
            if not self.space.page_out_read(live_set):
                live_set.n_full = min(live_set.n_full, self.space.n_without_disk(live_set))
                return

    def offload(self, seq: LiveSeq, live_set: BoundedSet) -> None:
        """Copy the live rows that are neither offloaded yet nor the store's, which may be asked still."""
        answer = live_set.in_store
        if answer is not None and len(self._own(live_set)) >= _STORED_MIN:
            wait((answer,))
            self.refer(live_set)
        while self._offload_piece(seq, live_set):
            pass

    def _own(self, live_set: BoundedSet) -> Positions:
        """int64[n], ascending: the positions live at their own places that are not offloaded yet."""
        is_own = live_set.has_own & (live_set.kept == live_set.places)
        return np.setdiff1d(live_set.kept[is_own], live_set.offloaded.positions)

    def _offload_piece(self, seq: LiveSeq, live_set: BoundedSet) -> bool:
        """Copy the first live rows that are not offloaded yet; False if there are none."""
        is_new = live_set.has_own & ~np.isin(live_set.kept, live_set.offloaded.positions)
        if not is_new.any():
            return False
        first = int(is_new.argmax())
        numbers = np.flatnonzero(is_new[first : first + _PIECE_ROWS])
        places = live_set.places[first : first + int(numbers[-1]) + 1]
        rows = self._memory.full_rows(seq.id, int(places[0]), int(places[-1]) + 1)
        chunk = self.space.lay_out(rows, live_set.kept[first:], numbers)
        live_set.offloaded = live_set.offloaded.add(chunk)
        return True

    def look_up(self, job: Job, seq: LiveSeq, live_set: BoundedSet) -> None:
        """Ask the store which of the rows it has that are offloaded or will be, if it was not asked yet."""
        if live_set.in_store is not None:
            return
        is_other = seq.provenance[: job.n_on_path(seq.n)] != Provenance.EXACT
        n = int(is_other.argmax()) if is_other.any() else len(is_other)
        wanted = np.union1d(live_set.offloaded.copied, self._own(live_set))
        wanted = wanted[wanted < n]
        if len(wanted) < _STORED_MIN:
            return
        parts = self._tiers.filed(job.path, int(wanted[0]), int(wanted[-1]) + 1)
        if parts:
            live_set.in_store = self._indexer.run(lambda: self._tiers.mapped(parts))

    def refer(self, live_set: BoundedSet) -> None:
        """Refer to the rows that the store has, once it has answered, and free the copies. If it has none
        of use, it is not asked again."""
        answer = live_set.in_store
        if answer is None or not answer.done() or not answer.result():
            return
        layout = self._memory.full_layout
        pieces = [rows.sections()[0] for rows in answer.result()]
        pieces = [rows for rows in pieces if rows.layout == layout]
        before = live_set.offloaded
        live_set.offloaded = before.stored(pieces, self._own(live_set))
        has_some = live_set.offloaded.n_stored > before.n_stored
        live_set.in_store = None if has_some else self._indexer.run(list)

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
