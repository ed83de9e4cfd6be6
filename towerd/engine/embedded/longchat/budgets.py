"""Budgets: keep each chat that has a budget within it.

A prompt is read in full while the context has places: its rows are exact, and the store keeps and shares them
like any other. At its end, and before a step that would exceed the budget afterwards, the policy chooses the
positions that stay, and the others are evicted from the context. A prompt that is longer than the context is
read in pieces, with such a choice after each. Positions keep their rotation, so holes are left. When a chat
reaches the last position of the context, its live rows are compacted: their keys are rotated to places without
holes. A chat that leaves the context is parked in RAM, because the store has no rows that were computed over a
partial live set.
"""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from towerd.engine.base import Kept, LiveBudget
from towerd.engine.embedded.context.core import Core
from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.live.live_set import BoundedSet, ExactPrefix, Shape
from towerd.engine.embedded.live.offloaded_rows import OffloadedRows
from towerd.engine.embedded.live.parked import Parked, ParkedTowers
from towerd.engine.embedded.live.pool import LivePool, LiveSeq
from towerd.engine.embedded.longchat.observer import QUERIES_MAX, Observer, n_queries_of
from towerd.engine.embedded.longchat.offload_space import OffloadSpace
from towerd.engine.embedded.longchat.recall import (
    QUERY_TOKENS_MAX,
    REEVALUATED_TOKENS,
    Recall,
    full_among_others,
    served,
)
from towerd.engine.embedded.restore.branching import (
    Branching,
    Evict,
    FoundLive,
    has_everything,
    worst_for,
)
from towerd.engine.embedded.restore.hooks import Hook
from towerd.engine.moving.rotation import Rotation
from towerd.errors import InvalidRequest, NotSupported, TowerdError, Unavailable
from towerd.model.speakers import message_starts
from towerd.retention import Positions, Signal, can_recall, retention_config
from towerd.settings.config import RETENTIONS, WATCHING, Config, parked_bytes
from towerd.slots.shift import turn
from towerd.slots.virtual import RowGatherer, heads_of
from towerd.tokens import Ids, Provenance

log = logging.getLogger(__name__)

_BUDGET_MIN = 16
HALF_LIVES = 4
"""Half-lives of attention whose queries are evaluated though the rows are there: what earlier queries paid
counts for a 16th."""
_GATHERED_CELLS = 2048
"""Cells whose rows are read at once when a chat is rewritten."""


class Budgets(Hook):
    """The hook of chats that have a budget."""

    can_move = False

    def __init__(
        self,
        branching: Branching,
        core: Core,
        observer: Observer | None,
        pool: LivePool,
        rotation: Rotation,
        config: Config,
        folder: Path,
    ) -> None:
        """observer: reads the attention; None if no policy uses it
        folder: where the rows that RAM has no room for are written, for chats to recall"""
        super().__init__(branching)
        self.parked = ParkedTowers(parked_bytes(config), pool.index)
        self.n_evictions = 0
        self.n_tokens_dropped = 0
        self.n_moves = 0
        self.n_packed = 0
        self._core = core
        self._memory = core.memory
        self._observer = observer
        self._pool = pool
        self._rotation = rotation
        self._config = config
        self.recall: Recall | None = None
        """None: the attention of this context cannot be read."""
        self._eog_ids = np.array(sorted(core.vocab.eog_ids), np.int32)
        if observer is not None:
            self.recall = Recall(core, pool, observer, branching.tiers, config, folder)
            self._warn(self.recall)

    def _warn(self, recall: Recall) -> None:
        """Say so if chats with the default budget can recall nothing."""
        budget = LiveBudget(self._config.retention, self._config.live_budget)
        if not budget.is_bounded or not can_recall(budget.policy):
            return
        n_ctx = self._core.n_ctx
        try:
            self.check(budget)
            config = served(budget, self._config, full_among_others(self._memory))
        except TowerdError:  # each request is told
            return
        if why := recall.space.why_nothing(BoundedSet.whole(budget, 0, n_ctx, config), n_ctx):
            log.warning(why)

    # ---- checks before a request is taken -------------------------------------------------

    def check(self, budget: LiveBudget) -> None:
        """Raise NotSupported or InvalidRequest, saying what is possible, if no chat of this model
        can be kept within `budget`. May be called by any thread."""
        if not budget.is_bounded:
            return
        if budget.policy not in RETENTIONS:
            raise InvalidRequest(
                f"There is no retention {budget.policy[:40]!r}: take one of "
                f"{', '.join(RETENTIONS)}."
            )
        kind = self._memory.kind
        if not kind.has_rows:
            raise NotSupported(
                f"Retention {budget.policy!r} drops single positions, and this model's state "
                f"({kind.name}) cannot lose one; take none or shift."
            )
        if budget.policy in WATCHING and self._observer is None:
            raise InvalidRequest(
                f"Retention {budget.policy!r} needs the model's attention, which is read only "
                f"by a towerd that was started for it: start it with --retention {budget.policy}, "
                "or take none, shift or streaming."
            )
        if not _BUDGET_MIN <= budget.tokens < self._core.n_ctx:
            raise InvalidRequest(
                f"A live budget of {budget.tokens} tokens is not possible: it must be at least "
                f"{_BUDGET_MIN} and less than the context ({self._core.n_ctx} tokens)."
            )
        try:
            config = retention_config(budget.policy, budget.tokens)
        except ValueError as error:
            raise InvalidRequest(f"The live budget cannot be used: {error}.") from error
        assert config.n_min <= BoundedSet.whole(budget, 0, 0).n_target

    @property
    def may_outgrow(self) -> bool:  # type: ignore[override]  # a constant of the base
        """See Hook.may_outgrow: live rows can be compacted if their keys can be rotated."""
        return not self._rotation.why_not

    # ---- a request begins ----------------------------------------------------------------

    def find(self, job: Job) -> FoundLive:
        """See Hook.find. Finds a chat of the same budget, live or parked, partial or not, or the
        first tokens of any other."""
        if job.request.precache is not None:
            return super().find(job)
        live, scope, ids = job.request.live, job.request.scope, job.ids[: job.n - 1]
        n_adoptable = self.n_adoptable(job)

        def is_own(chat: LiveSeq | Parked) -> bool:
            kept = chat.live_set
            return isinstance(kept, BoundedSet) and kept.budget == live and chat.scope == scope

        def n_usable(chat: LiveSeq | Parked, n: int) -> int:
            n_own = self.branching.n_continuable(chat, n)
            if is_own(chat) and self._can_continue(bounded(chat), n_own):
                return n_own
            n_both = min(n, n_adoptable)
            return self.branching.n_continuable(chat, n_both) if has_everything(chat) else 0

        def counts(chat: LiveSeq | Parked) -> bool:
            return is_own(chat) or has_everything(chat)

        found = self._pool.index.longest(ids, scope, counts, n_usable)
        if found.source is not None and self._is_better_stored(job, found):
            found = self._pool.index.longest(ids, scope, has_everything, n_usable)
        return self.branching.usable(job, found)

    def _can_continue(self, live_set: BoundedSet, n: int) -> bool:
        """Whether a chat can continue after its first `n` tokens. Where that is at a state checkpoint, the
        tokens behind it would be evaluated over what was thinned at their end."""
        is_behind = self._memory.kind.can_slice or n >= live_set.n_chosen
        return is_behind and live_set.can_continue_from(n)

    def _is_better_stored(self, job: Job, found: FoundLive) -> bool:
        """Whether a chat was thinned by attention for what came behind the tokens that were found, and the
        store has the rows of all of them."""
        assert found.source is not None
        live_set = found.source.live_set
        if not isinstance(live_set, BoundedSet) or found.n >= live_set.n_chosen - 1:
            return False
        if not live_set.policy.signals:
            return False
        if live_set.can_recall and job.n_prompt - found.n <= REEVALUATED_TOKENS:
            return False  # another reply to the same prompt can recall what that looks for
        if not self._memory.kind.can_slice:
            return False
        plan = self.branching.tiers.plan(job.path, 0, job.n_on_path(found.n), worst=worst_for(job))
        return plan.n >= found.n

    def open(self, job: Job, found: FoundLive, capacity: int, evict: Evict) -> LiveSeq | None:
        if isinstance(found.source, Parked):
            return self._open_parked(found.source, found.n, capacity, evict)
        return super().open(job, found, capacity, evict)

    def enter(self, job: Job, seq: LiveSeq) -> None:
        """See Hook.enter: the sequence gets a live set for the job's budget."""
        budget, live = job.request.live, seq.live_set
        if not isinstance(live, BoundedSet) or live.budget != budget or live.failure is not None:
            assert not seq.is_partial, "a partial live set went to a request of another budget"
            config = served(budget, self._config, full_among_others(self._memory))
            shape, n_ctx = self._shape(budget), self._core.n_ctx
            seq.live_set = live = BoundedSet.whole(budget, seq.n, n_ctx, config, shape)
        live.n_prompt, live.n_full = job.n_prompt, self._core.n_ctx
        is_cut = live.can_recall and not self._memory.kind.can_slice
        live.n_stop = max(1, job.n_prompt - REEVALUATED_TOKENS) if is_cut else 0
        if live.can_recall and self.recall is not None:
            live.n_full = min(live.n_full, self.recall.space.n_max(live))
        job.before_recall = None

    def _shape(self, budget: LiveBudget) -> Shape:
        """How many layers and KV heads choose for themselves."""
        layout = self._memory.full_layout
        if budget.scope == "all":
            return 1, 1
        if budget.scope == "layer" or self._observer is None:
            return layout.n_layer, 1
        return layout.n_layer, heads_of(layout.k, self._observer.attention.head_size)

    def n_loadable(self, job: Job, seq: LiveSeq) -> int:
        """See Hook.n_loadable. Behind what was thinned only a policy that can recall takes rows."""
        n = super().n_loadable(job, seq)
        recalls = can_recall(job.request.live.policy) and self._memory.kind.can_slice
        if seq.is_partial and not (recalls and seq.was_only_loaded):
            return 0
        return min(n, max(seq.n, self.n_adoptable(job)))

    # ---- sharing rows with others ---------------------------------------------------------

    def n_adoptable(self, job: Job) -> int:
        """How many tokens a job may take rows for from the store or from another chat: as many as the
        context holds beside one more. A policy that uses attention needs the queries before the first
        eviction, which only an evaluation has: the last ones, or those of the last half-lives. One that can
        recall needs those by which it chooses at the end of the prompt."""
        n_max, live = self._core.n_ctx - 1, job.request.live
        if live.policy not in WATCHING:
            return n_max
        if can_recall(live.policy):
            return max(0, min(n_max, job.n_prompt - QUERY_TOKENS_MAX))
        n_first = min(self._core.n_ctx, max(live.tokens, job.n_prompt))
        half_life = retention_config(live.policy, live.tokens).half_life
        n_queries = QUERIES_MAX if math.isinf(half_life) else math.ceil(HALF_LIVES * half_life)
        return max(0, min(n_max, n_first - n_queries))

    def n_given(self, job: Job) -> int:
        """See Hook.n_given: the tokens that are there until its prompt has been read."""
        return min(job.n, job.request.live.tokens)

    def n_taken(self, job: Job, n: int) -> int:
        return min(n, self.n_adoptable(job))

    # ---- while it runs -------------------------------------------------------------------

    def before_step(self, job: Job, evict: Evict) -> None:
        """See Hook.before_step. Raises Unavailable if no cells can be freed to compact the chat."""
        seq = job.seq
        assert seq is not None
        live_set = bounded(seq)
        if seq.n + 1 > len(seq.ids):
            self._pool.grow(seq, seq.n + max(live_set.budget.tokens, seq.n // 4))
        self._thin(job, seq, live_set, evict)
        if live_set.place_next >= live_set.n_places and self.may_outgrow:
            self._move(job, seq, live_set, evict)
        self._keep_state(job, seq, live_set)

    def awaits_recall(self, job: Job) -> bool:
        """See Hook.awaits_recall. A chat that can recall first gets what its prompt looks for."""
        if job.seq is None or job.was_recalled:
            return False
        live_set = bounded(job.seq)
        if not live_set.can_recall or not live_set.is_partial:
            return False
        return job.n_live == job.n_prompt and job.request.n_predict != 0

    def prompt_done(self, job: Job, evict: Evict) -> None:
        """See Hook.prompt_done: from here on the budget holds, and the reply reports what is live."""
        seq = job.seq
        if seq is None:
            return
        if job.request.n_predict != 0:
            with suppress(Unavailable):  # the next step has other requests give way
                self._thin(job, seq, bounded(seq), evict)
        bounded(seq).keys = None
        job.reuse = replace(job.reuse, kept=seq.n_cells)

    def evaluating(self, batch: list[Job], mine: list[Job]) -> AbstractContextManager[None]:
        """See Hook.evaluating: collect the queries that evictions will use, and index the positions
        that have left their windows."""
        if self._observer is not None:
            self._observer.watch((job, self._n_queries(job) if job in mine else 0) for job in batch)
        return nullcontext() if self.recall is None else self.recall.indexing(mine)

    def close(self) -> None:
        """End the threads. No job may run any more."""
        if self.recall is not None:
            self.recall.close()

    def _n_queries(self, job: Job) -> int:
        """For how many of the job's last tokens in the batch the next eviction uses the queries."""
        if job.seq is None:
            return 0
        live_set = bounded(job.seq)
        if not live_set.policy.signals:
            return 0
        if Signal.MASS in live_set.policy.signals:
            return job.n_in_batch
        n_max, ahead = n_queries_of(live_set.policy), live_set.room
        if live_set.can_recall and self.recall is not None:
            n_max, ahead = QUERY_TOKENS_MAX, self.recall.n_ahead(job, live_set)
        n_after = max(0, ahead - job.n_in_batch)
        return max(0, min(job.n_in_batch, n_max - n_after))

    def after_step(self, job: Job) -> None:
        if self._observer is not None and job.seq is not None:
            self._observer.observe(job, bounded(job.seq))
        if self.recall is not None and job.seq is not None:
            self.recall.refer(bounded(job.seq))

    def _thin(self, job: Job, seq: LiveSeq, live_set: BoundedSet, evict: Evict) -> None:
        """Choose the live positions again, if that is due."""
        if live_set.can_recall:
            self._choose(job, seq, live_set, evict)
        elif live_set.n_more == 0:
            self._evict(job, seq, live_set, evict)

    def _evict(self, job: Job, seq: LiveSeq, live_set: BoundedSet, evict: Evict) -> None:
        if self._observer is not None and live_set.policy.signals:
            self._observer.measure(seq, live_set)
        has_messages = Signal.MESSAGES in live_set.policy.signals
        chosen = live_set.choose(self._messages(job, seq.n) if has_messages else None)
        self._keep_exact_prefix(job, seq, live_set)
        n_before, stay = len(live_set.kept), live_set.agreed(chosen)
        if stay is None:
            self._mix(seq, live_set, chosen, evict)
        else:
            self._pool.evict(seq, live_set, stay)
            self._defragment(seq, live_set, n_before - len(stay))
        live_set.n_chosen = live_set.n
        self.n_evictions += 1
        self.n_tokens_dropped += n_before - len(live_set.kept)

    def _mix(self, seq: LiveSeq, live_set: BoundedSet, chosen: Positions, evict: Evict) -> None:
        """Rewrite the cells of a chat so that each group has the rows of its chosen positions, which are
        live. Raises Unavailable if no cells can be freed."""
        ranks = live_set.ranks_of(chosen)
        rotated = np.take_along_axis(live_set.rotated(), ranks, axis=2)
        gatherer = RowGatherer(self._memory.full_layout, ranks)
        labels = rotated[0, 0].astype(np.int32)
        ends = [*live_set.places[::_GATHERED_CELLS].tolist(), live_set.place_next]
        exts: list[npt.NDArray[np.int32]] = []
        for each in pairwise(ends):
            piece = self._memory.full_rows(seq.id, *each)
            gatherer.add(piece)
            exts += [] if piece.ext is None else [piece.ext]
        ext = np.concatenate(exts)[ranks[0, 0]] if exts else None
        self._pool.rewrite(seq, gatherer.rows(labels, ext), evict)
        live_set.mix(chosen, rotated, rotated[0, 0], ranks)

    def _keep_exact_prefix(self, job: Job, seq: LiveSeq, live_set: BoundedSet) -> None:
        """Before the first eviction, keep the rows of the chat that the store lacks."""
        if live_set.is_partial:
            return
        stop = job.n_on_path(seq.n)
        stored = self.branching.tiers.plan(job.path, 0, stop, worst=Provenance.EXACT)
        if stored.n >= seq.n:
            return
        rows = self._offloaded(live_set, stored.n) or self._memory.rows(seq.id, stored.n, seq.n)
        if rows is not None:
            ids, provenance = seq.tokens().copy(), seq.provenance[: seq.n].copy()
            live_set.exact = ExactPrefix(ids, provenance, stored.n, rows)

    def _offloaded(self, live_set: BoundedSet, n_from: int) -> OffloadedRows | None:
        """The offloaded rows of a whole chat from token `n_from` on; None if some are not offloaded, or if
        rows have parts that are not."""
        memory, last = self._memory, np.arange(n_from, live_set.n)
        if memory.full_layout != memory.layout or memory.head is not None:
            return None
        there = live_set.offloaded.positions
        if len(there) < len(last) or not np.array_equal(there[len(there) - len(last) :], last):
            return None
        return live_set.offloaded.only(last)

    def _defragment(self, seq: LiveSeq, live_set: BoundedSet, n_dropped: int) -> None:
        """After a large eviction, rewrite the live rows into consecutive cells: every step visits
        all cells up to the last one in use."""
        if n_dropped < live_set.budget.tokens or any(run.owners != {seq.id} for run in seq.runs):
            return
        self._pool.pack(seq)
        self.n_packed += 1

    def _choose(self, job: Job, seq: LiveSeq, live_set: BoundedSet, evict: Evict) -> None:
        """If a choice is due, let a policy that can recall choose the live positions again."""
        recall, observer = self.recall, self._observer
        assert recall is not None
        assert observer is not None
        if job.n_begun < 0 and job.phase is JobPhase.PREFILL:
            job.n_begun = seq.n
        is_full = live_set.room == 0
        if job.phase is JobPhase.PREFILL and self.awaits_recall(job):
            queries = observer.scaled_queries(live_set, job.n_begun)
            recall.ask(live_set, job.ids[: job.n_prompt], job.n_prompt - job.n_begun)
            self._go_back(job, seq, live_set, evict)
            job.was_recalled = True
        elif recall.is_due(job, live_set):
            queries = observer.scaled_queries(live_set, live_set.n_chosen)
        elif is_full:
            queries = observer.scaled_queries(live_set, 0)
            job.before_recall = None
        else:
            recall.offload_read(job, seq, live_set)
            return
        recall.look_up(job, seq, live_set)
        recall.offload(seq, live_set)
        self._keep_exact_prefix(job, seq, live_set)
        if Signal.MASS in live_set.policy.signals:
            observer.measure(seq, live_set)
        has_messages = Signal.MESSAGES in live_set.policy.signals
        messages = self._messages(job, seq.n) if has_messages else None
        n_dropped = recall.choose(seq, live_set, queries, messages, evict)
        self.n_tokens_dropped += n_dropped
        self.n_evictions += is_full
        self._defragment(seq, live_set, n_dropped)
        self._bound_idle(recall.space, evict)

    def _bound_idle(self, space: OffloadSpace, evict: Evict) -> None:
        """Free what chats without a request can recall from, live or parked, beyond the RAM of the parked
        ones: parked chats, then rows that are not live, then chats, the least recently used first."""
        idle = sorted((seq for seq in self._pool if not seq.busy), key=lambda seq: -seq.last_used)
        sets = [seq.live_set for seq in idle if isinstance(seq.live_set, BoundedSet)]
        while self.parked.nbytes + self._idle_bytes() > self.parked.bytes_max:
            if self.parked.drop_one():
                continue
            if sets:
                space.forget_idle(sets.pop())
            elif not evict():
                return

    def _idle_bytes(self) -> int:
        """RAM that live chats without a request can recall from."""
        sets = [seq.live_set for seq in self._pool if not seq.busy]
        return sum(each.n_bytes_offloaded for each in sets if isinstance(each, BoundedSet))

    def _keep_state(self, job: Job, seq: LiveSeq, live_set: BoundedSet) -> None:
        """Keep the state that a prompt is read again from after the recall, in a memory that cannot be cut."""
        if live_set.is_partial and 0 < live_set.n_stop <= seq.n < job.n_prompt:
            if job.before_recall is None and seq.is_whole and not job.was_recalled:
                job.before_recall = seq.n, self._memory.snapshot(seq.id)

    def _go_back(self, job: Job, seq: LiveSeq, live_set: BoundedSet, evict: Evict) -> None:
        """Cut the last tokens of a prompt, which are evaluated again. Raises Unavailable, with nothing changed."""
        if not live_set.n_stop:
            n_back = max(1, self._memory.n_back(seq.id))
            n_again = min(REEVALUATED_TOKENS, seq.n - job.n_begun, live_set.n_tail - 1, n_back)
            self._pool.truncate(seq, seq.n - n_again)
            return
        assert job.before_recall is not None, "a prompt's end was evaluated without its state"
        n, state = job.before_recall
        rows = self._memory.full_rows(seq.id, 0, seq.place_of(n))
        self._pool.rewrite(seq, rows, evict, state)
        job.before_recall = None
        live_set.truncate(n)
        seq.n = n
        seq.states = {p: each for p, each in seq.states.items() if p <= n}

    def _messages(self, job: Job, n: int) -> Positions:
        """int64[n]: the number of the message that each token is part of, by the marks of the chat template;
        where it names no speakers, a message ends with an end-of-generation token."""
        begins = np.zeros(n + 1, np.bool_)
        starts = message_starts(job.ids[:n], self._core.vocab)
        if starts:
            begins[[start.at for start in starts]] = True
        else:
            begins[1:] = np.isin(job.ids[:n], self._eog_ids)
        return np.cumsum(begins[:n], dtype=np.int64)

    def _move(self, job: Job, seq: LiveSeq, live_set: BoundedSet, evict: Evict) -> None:
        """Make room for a chat that has reached the last place of its context."""
        if live_set.can_recall and self.recall is not None:
            self.recall.move_down(seq, live_set, self._rotation.rope(), evict)
        else:
            self._compact(seq, live_set, evict)
        self.n_moves += 1
        job.before_recall = None

    def _compact(self, seq: LiveSeq, live_set: BoundedSet, evict: Evict) -> None:
        """Move the live rows to places without holes, their keys rotated: to the first ones, or as far
        behind them as the windows of other layers reach back. Some positions were evicted by then, because
        a budget is less than the context."""
        if self._observer is not None and live_set.observed and not live_set.can_recall:
            self._observer.measure(seq, live_set)  # those queries saw the places before
        rows, end = self._memory.full_rows(seq.id, 0, live_set.place_next), live_set.place_next
        n_most = max(len(rows), live_set.n_places // 2)
        n_reached = max(len(rows), min(self._memory.n_beside(seq.id), n_most))
        to = np.arange(n_reached - len(rows), n_reached, dtype=np.int64)
        rope, rot_k = self._rotation.rope(), self._core.info.row_identity.rot_k
        rows = turn(rows, live_set.rotated(), to, rope.sections[0], rot_k=rot_k)
        beside = self._memory.moved_beside(seq.id, n_reached - end, rope, rot_k=rot_k)
        self._pool.rewrite(seq, rows, evict, beside)
        live_set.compacted(to)

    # ---- out of the context and back -----------------------------------------------------

    def leaving(self, seq: LiveSeq) -> None:
        """See Hook.leaving: the live rows of a partial sequence are kept in RAM, unless its index
        is broken: then no request could continue it."""
        live_set = bounded(seq)
        if not seq.is_partial or live_set.failure is not None:
            return
        live_set.keys = None  # a request that was cancelled may have left them
        blob, n_min = self._memory.park(seq.id), max(0, seq.n - self._memory.n_back(seq.id))
        rows = seq.tokens().copy(), seq.provenance[: seq.n].copy(), live_set, blob, n_min
        self.parked.add(Parked(seq.scope, seq.session, *rows, seq.n_reserved, seq.decoded))

    def _open_parked(self, parked: Parked, n: int, capacity: int, evict: Evict) -> LiveSeq | None:
        """Open a sequence with the first `n` tokens of a parked chat; None if no sequence or not
        enough cells are free. If `n` is not all of the chat, it stays parked as well."""
        self.parked.take(parked)  # evictions for it could otherwise push it out
        n_cells = len(parked.live_set.kept) + parked.n_reserved
        is_possible = (self._pool.can_open() or evict()) and self._pool.has_room(n_cells, evict)
        if not is_possible or n < parked.n:
            self.parked.add(parked)
        if not is_possible:
            return None
        seq = self._pool.open(parked.scope, capacity)
        self._fill_from_parked(parked, seq, n)
        return seq

    def _fill_from_parked(self, parked: Parked, seq: LiveSeq, n: int) -> None:
        """Fill the empty sequence `seq` with the first `n` tokens of a parked chat."""
        self._memory.append(seq.id, parked.blob, is_empty=True)
        self._pool.grow(seq, parked.n)
        seq.ids[: parked.n], seq.provenance[: parked.n] = parked.ids, parked.provenance
        seq.n, seq.decoded = parked.n, parked.decoded
        seq.live_set = parked.live_set if n == parked.n else parked.live_set.fork()
        self._pool.take(seq, len(parked.live_set.kept))
        self._pool.truncate(seq, n)
        self._pool.reserve(seq)

    def kept(self, ids: Ids, scope: str) -> Kept | None:
        """The kept positions of the chat whose tokens are `ids`, live or parked."""

        def n_usable(chat: LiveSeq | Parked, n: int) -> int:
            is_it = chat.scope == scope and n == min(chat.n, len(ids))
            return n if is_it and isinstance(chat.live_set, BoundedSet) else 0

        chat = self._pool.index.longest(ids, scope, usable=n_usable).source
        if chat is None:
            return None
        best = bounded(chat)
        return Kept(best.budget.policy, best.budget.tokens, best.n, tuple(_runs(best.kept)))

    def stats(self) -> dict[str, float]:
        """Counters and gauges. May be called by any thread."""
        sets = [seq.live_set for seq in list(self._pool)]  # read once: it may be replaced meanwhile
        live = [each for each in sets if isinstance(each, BoundedSet)]
        parked = [each.live_set for each in list(self.parked)]
        files = {file for live_set in (*live, *parked) for file in live_set.offloaded.files}
        return {
            "retention_evictions": self.n_evictions,
            "retention_tokens_dropped": self.n_tokens_dropped,
            "retention_moves": self.n_moves,
            "retention_packed": self.n_packed,
            "retention_observe_s": 0.0 if self._observer is None else self._observer.observe_s,
            "parked_sequences": len(self.parked),
            "parked_bytes": self.parked.nbytes,
            "recall_bytes": sum(live_set.n_bytes_offloaded for live_set in live),
            "recall_disk_bytes": sum(file.n_bytes for file in files),
            **({} if self.recall is None else self.recall.stats()),
        }


def bounded(seq: LiveSeq | Parked) -> BoundedSet:
    """The live set of a chat that has a budget."""
    assert isinstance(seq.live_set, BoundedSet), "a chat with a budget has everything live"
    return seq.live_set


def _runs(positions: npt.NDArray[np.integer]) -> list[tuple[int, int]]:
    """The runs [p0, p1) of consecutive ones among `positions`, which ascend."""
    breaks = np.flatnonzero(np.diff(positions) > 1)
    starts = positions[np.concatenate([[0], breaks + 1])].tolist()
    ends = (positions[np.concatenate([breaks, [-1]])] + 1).tolist()
    return list(zip(starts, ends, strict=True))
