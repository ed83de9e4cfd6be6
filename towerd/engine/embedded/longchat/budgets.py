"""Budgets: keeps chats that have a budget within it.

Before a step that would exceed the budget, the policy says what stays and the rest is dropped
from the context; positions keep their rotation, so holes are left. When a chat reaches the last
position of the context, what is live of it is moved together: keys are rotated to places without
holes, so that a chat may be longer than any context. What left the context is parked in RAM, for
the store has no rows that were computed under a thinned cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from towerd.config import RETENTIONS, WATCHING
from towerd.engine.base import Kept, LiveBudget
from towerd.engine.embedded.longchat.hook import Hook
from towerd.engine.embedded.longchat.live_set import Beginning, BoundedSet
from towerd.engine.embedded.longchat.observer import QUERIES_MAX
from towerd.engine.embedded.longchat.parked import Parked, ParkedTowers
from towerd.engine.embedded.longchat.recall import (
    ASKED_AGAIN_TOKENS,
    ASKING_TOKENS_MAX,
    Recaller,
    RecallLimits,
    served,
)
from towerd.engine.embedded.model.core import Core
from towerd.engine.embedded.restore.branching import Evict, Found, TokenBranching
from towerd.engine.embedded.restore.splice import Splicer
from towerd.engine.embedded.scheduling.job import Job, Phase
from towerd.engine.embedded.scheduling.pool import LivePool, LiveSeq, is_idler
from towerd.errors import InvalidRequest, NotSupported, Unavailable
from towerd.retention import Positions, Signal, can_recall, retention_config
from towerd.slots.blob import emit_blob
from towerd.slots.kind import DENSE
from towerd.slots.rows import KVRows, join
from towerd.slots.shift import compose_at
from towerd.tokens import Ids, common_prefix

_BUDGET_MIN = 16


@dataclass(frozen=True, slots=True)
class FoundParked(Found):
    """A request can go on from a chat that left the context."""

    parked: Parked | None = None


class Budgets(Hook):
    """The hook of chats that have a budget."""

    can_splice = False

    def __init__(
        self,
        branching: TokenBranching,
        core: Core,
        pool: LivePool,
        splicer: Splicer,
        parked_bytes_max: int,
        recall: RecallLimits,
        folder: Path,
    ) -> None:
        """folder: of the files with rows that chats may recall and RAM has no room for"""
        super().__init__(branching)
        self._tokens = branching
        self.parked = ParkedTowers(parked_bytes_max)
        self.n_evictions = 0
        self.n_tokens_dropped = 0
        self.n_moves = 0
        self.n_packed = 0
        self._core = core
        self._memory = core.memory
        self._observer = core.observer
        self._pool = pool
        self._splicer = splicer
        self._recall = recall
        self._recaller: Recaller | None = None
        if core.observer is not None:
            self._recaller = Recaller(core, pool, core.observer, recall, folder)
        self._eog_ids = np.array(sorted(core.vocab.eog_ids), np.int32)

    # ---- asked before a request is taken -------------------------------------------------

    def check(self, budget: LiveBudget) -> None:
        """Raises NotSupported or InvalidRequest, saying what is possible, if no chat of this
        model can be kept within `budget`. Any thread may ask."""
        if not budget.is_bounded:
            return
        if budget.policy not in RETENTIONS:
            raise InvalidRequest(
                f"There is no retention {budget.policy[:40]!r}: take one of "
                f"{', '.join(RETENTIONS)}."
            )
        if budget.policy in WATCHING and self._observer is None and self._memory.kind is DENSE:
            raise InvalidRequest(
                f"Retention {budget.policy!r} goes by what the attention says, which is read only "
                f"by a towerd that was started for it: start it with --retention {budget.policy}, "
                "or take none, shift or streaming."
            )
        if self._memory.kind is not DENSE:
            raise NotSupported(
                f"Retention {budget.policy!r} drops single positions, and this model's state "
                f"({self._memory.kind.name}) cannot lose one; take none or shift."
            )
        if not _BUDGET_MIN <= budget.tokens < self._core.n_ctx:
            raise InvalidRequest(
                f"A live budget of {budget.tokens} tokens cannot be: it must be at least "
                f"{_BUDGET_MIN} and less than the context ({self._core.n_ctx} tokens)."
            )
        try:
            config = retention_config(budget.policy, budget.tokens)
        except ValueError as error:
            raise InvalidRequest(f"The live budget does not do: {error}.") from error
        assert config.n_min <= BoundedSet.whole(budget, 0, 0).n_target

    @property
    def may_outgrow(self) -> bool:  # type: ignore[override]  # a constant of the base
        """See Hook.may_outgrow: what is live can be moved together."""
        return self._splicer.can_rotate

    # ---- a request begins ----------------------------------------------------------------

    def find(self, job: Job) -> Found:
        """See Hook.find: a chat of the same budget, live or parked, thinned or not, or the
        beginning of any other."""
        if job.request.precache is not None:
            return super().find(job)
        live, ids, scope = job.request.live, job.ids[: job.n - 1], job.request.scope
        own, n_own = self._best(job)
        source, n = self._pool.best_prefix(ids[: self.n_adoptable(live)], scope)
        found = self._tokens.usable(job, *((own, n_own) if n_own > n else (source, n)))
        parked, n_parked = self.parked.best(ids, scope, live)
        return found if n_parked <= found.n else FoundParked(None, n_parked, parked)

    def n_at_hand(self, job: Job) -> int:
        """See Hook.n_at_hand."""
        return self.find(job).n

    def _best(self, job: Job) -> tuple[LiveSeq | None, int]:
        """The sequence of this budget that shares the longest prefix with the job's prompt and can
        go on from its end, and its length."""
        best: LiveSeq | None = None
        best_n = 0
        for seq in self._pool:
            live = seq.live_set
            if not isinstance(live, BoundedSet) or live.budget != job.request.live:
                continue
            n = common_prefix(seq.tokens(), job.ids[: job.n - 1])
            if seq.scope != job.request.scope or not live.can_go_on_from(n):
                continue
            if n > best_n or (best is not None and n == best_n and is_idler(seq, best)):
                best, best_n = seq, n
        return best, best_n

    def open(self, job: Job, found: Found, capacity: int, evict: Evict) -> LiveSeq | None:
        """See Hook.open."""
        if isinstance(found, FoundParked) and found.parked is not None:
            return self._unparked(found.parked, found.n, capacity, evict)
        return super().open(job, found, capacity, evict)

    def enter(self, job: Job, seq: LiveSeq) -> None:
        """See Hook.enter: the sequence gets the live set that the job's budget wants."""
        budget, live = job.request.live, seq.live_set
        if isinstance(live, BoundedSet) and live.budget == budget:
            return
        assert not seq.is_thinned, "a thinned sequence went to a request of another budget"
        config = served(retention_config(budget.policy, budget.tokens), self._recall)
        seq.live_set = BoundedSet.whole(budget, seq.n, self._core.n_ctx, config)

    def n_loadable(self, job: Job, seq: LiveSeq) -> int:
        """See Hook.n_loadable. What a policy that can recall has no room for goes to the shelf."""
        budget, n = job.request.live, super().n_loadable(job, seq)
        if seq.is_thinned:
            return 0
        if can_recall(budget.policy):
            return min(n, max(seq.n, self._core.n_ctx - 1))
        return min(n, max(seq.n, min(budget.tokens, self.n_adoptable(budget))))

    # ---- what others may have ------------------------------------------------------------

    def n_adoptable(self, budget: LiveBudget) -> int:
        """How many tokens a chat of this budget may have the rows of, from the store or from
        another chat, that were not evaluated for it. A policy that goes by attention needs the
        queries before the first eviction, which only an evaluation has; one that can recall asks
        again at the end of the prompt."""
        if budget.policy not in WATCHING or can_recall(budget.policy):
            return self._core.n_ctx
        return max(0, budget.tokens - QUERIES_MAX)

    def n_given(self, job: Job) -> int:
        """See Hook.n_given: what was evaluated before an eviction."""
        return min(job.n, job.request.live.tokens)

    def n_taken(self, job: Job, n: int) -> int:
        """See Hook.n_taken."""
        return min(n, self.n_adoptable(job.request.live))

    # ---- it runs -------------------------------------------------------------------------

    def before_step(self, job: Job, evict: Evict) -> None:
        """See Hook.before_step. Raises Unavailable when no cells can be had to move the chat
        together."""
        seq = job.seq
        assert seq is not None
        retained = bounded(seq)
        if seq.n + 1 > len(seq.ids):
            self._pool.grow(seq, seq.n + max(retained.budget.tokens, seq.n // 4))
        if retained.can_recall:
            self._choose(job, seq, retained, evict)
        elif len(retained.kept) >= retained.budget.tokens:
            self._evict(job, seq, retained)
        if retained.place_next >= retained.n_places and self.may_outgrow:
            self._move(seq, retained, evict)

    def is_asking(self, job: Job) -> bool:
        """See Hook.is_asking. A chat that can recall is asked first what its prompt looks for."""
        if job.seq is None or job.was_asked:
            return False
        retained = bounded(job.seq)
        if not retained.can_recall or not retained.is_thinned:
            return False
        return job.n_live == job.n_prompt and job.request.n_predict != 0

    def prompt_done(self, job: Job) -> None:
        """See Hook.prompt_done: the reply says how much is live."""
        if job.seq is not None:
            job.reuse = replace(job.reuse, kept=job.seq.n_cells)

    def evaluating(self, jobs: Iterable[Job]) -> AbstractContextManager[None]:
        """While the batch of `jobs`, chats with budgets among them, is evaluated: what has left
        their windows enters the indexes."""
        return nullcontext() if self._recaller is None else self._recaller.indexing(jobs)

    def close(self) -> None:
        """End the threads. No job may run any more."""
        if self._recaller is not None:
            self._recaller.close()

    def n_queries(self, job: Job) -> int:
        """See Hook.n_queries: those that are seen by the next eviction."""
        if job.seq is None:
            return 0
        retained = bounded(job.seq)
        if not retained.policy.signals:
            return 0
        n_max, ahead = QUERIES_MAX, retained.room
        if retained.can_recall and self._recaller is not None:
            n_max, ahead = ASKING_TOKENS_MAX, self._recaller.n_ahead(job, retained)
        n_after = max(0, ahead - job.n_in_batch)
        return max(0, min(job.n_in_batch, n_max - n_after))

    def after_step(self, job: Job) -> None:
        """See Hook.after_step."""
        if self._observer is not None and job.seq is not None:
            self._observer.observe(job, bounded(job.seq))

    def _evict(self, job: Job, seq: LiveSeq, retained: BoundedSet) -> None:
        if self._observer is not None and retained.policy.signals:
            self._observer.measure(seq, retained)
        has_messages = Signal.MESSAGES in retained.policy.signals
        view = retained.view(self._messages(job, seq.n) if has_messages else None)
        stay = retained.policy.keep(view, retained.n_target)
        self._keep_beginning(seq, retained)
        n_dropped = self._pool.thin(seq, retained, stay)
        self.n_evictions += 1
        self.n_tokens_dropped += n_dropped
        self._pack(seq, retained, n_dropped)

    def _keep_beginning(self, seq: LiveSeq, retained: BoundedSet) -> None:
        """Before the first eviction: copy what the store may have of the chat."""
        rows = None if retained.is_thinned else self._memory.rows(seq.id, 0, seq.n)
        if rows is not None:
            ids, provenance = seq.tokens().copy(), seq.provenance[: seq.n].copy()
            retained.exact = Beginning(ids, provenance, rows)

    def _pack(self, seq: LiveSeq, retained: BoundedSet, n_dropped: int) -> None:
        """What is left of a long chat lies scattered over its cells, and every step goes over all
        cells up to the last one in use: after a large eviction it is written together."""
        if n_dropped < retained.budget.tokens or any(run.owners != {seq.id} for run in seq.runs):
            return
        blob = self._core.context.get_state(seq.id)
        self._pool.let_go(seq)
        self._memory.append(seq.id, blob, is_empty=True)
        self._pool.take(seq, len(retained.kept))
        self.n_packed += 1

    def _choose(self, job: Job, seq: LiveSeq, retained: BoundedSet, evict: Evict) -> None:
        """If it is time to, let a policy that can recall choose anew what is live."""
        recaller, observer = self._recaller, self._observer
        assert recaller is not None
        assert observer is not None
        if job.n_begun < 0 and job.phase is Phase.PREFILL:
            job.n_begun = seq.n
        is_full = len(retained.kept) >= retained.budget.tokens
        if job.phase is Phase.PREFILL and self.is_asking(job):
            job.was_asked = True
            asking = observer.asking(retained, job.n_begun)
            n_again = min(ASKED_AGAIN_TOKENS, seq.n - job.n_begun, retained.n_tail - 1)
            self._pool.truncate(seq, seq.n - n_again)
        elif recaller.is_due(job, retained):
            asking = observer.asking(retained, retained.n_chosen)
        elif is_full:
            asking = observer.asking(retained, 0)
        else:
            return
        self._keep_beginning(seq, retained)
        n_dropped = recaller.choose(seq, retained, asking, evict)
        self.n_tokens_dropped += n_dropped
        self.n_evictions += is_full
        self._pack(seq, retained, n_dropped)

    def _messages(self, job: Job, n: int) -> Positions:
        """int64[n]: how many messages have ended before each token."""
        ends = np.isin(job.ids[:n], self._eog_ids)
        return np.concatenate([[0], np.cumsum(ends)[:-1]]).astype(np.int64)[:n]

    def _move(self, seq: LiveSeq, retained: BoundedSet, evict: Evict) -> None:
        """Go on with a chat that has reached the last place of its context."""
        if retained.can_recall and self._recaller is not None:
            self._recaller.move_down(seq, retained, self._splicer.rope(), evict)
        else:
            self._move_together(seq, retained, evict)
        self.n_moves += 1

    def _move_together(self, seq: LiveSeq, retained: BoundedSet, evict: Evict) -> None:
        """Move the live rows to the places [0, m), their keys rotated. By then something was
        dropped, for a budget is less than the context."""
        if self._observer is not None and retained.observed and not retained.can_recall:
            self._observer.measure(seq, retained)  # those queries saw the places before
        rows = self._memory.rows(seq.id, 0, retained.place_next)
        assert rows is not None
        rot_k = self._core.info.fingerprint.rot_k
        moved = compose_at(runs_of(rows), self._splicer.rope(), rot_k=rot_k)
        blob = np.asarray(emit_blob([join(moved)], v_trans=self._core.context.v_trans))
        self._pool.let_go(seq)
        retained.moved_together()
        while self._pool.cells_free < len(rows):  # others share what was let go of
            if not evict():
                raise Unavailable("The live context is full of running requests; try again later.")
        self._memory.append(seq.id, blob, is_empty=True)
        self._pool.take(seq, len(rows))

    # ---- out of the context and back -----------------------------------------------------

    def leaving(self, seq: LiveSeq) -> None:
        """See Hook.leaving: what is live of a thinned sequence is kept in RAM; not if its index is
        broken, for then nobody could go on with it."""
        retained = bounded(seq)
        if not seq.is_thinned or retained.failure is not None:
            return
        blob = self._core.context.get_state(seq.id)
        ids, provenance = seq.tokens().copy(), seq.provenance[: seq.n].copy()
        self.parked.add(Parked(seq.scope, seq.session, ids, provenance, retained, blob))

    def _unparked(self, parked: Parked, n: int, capacity: int, evict: Evict) -> LiveSeq | None:
        """The first `n` tokens of a parked chat in a sequence of their own; None if there is none,
        or no cells for it. Where that is not all of it, the chat stays parked as well."""
        self.parked.take(parked)  # what is evicted for it could push it out
        is_possible = (self._pool.can_open() or evict()) and self._can_unpark(parked, evict)
        if not is_possible or n < parked.n:
            self.parked.add(parked)
        if not is_possible:
            return None
        seq = self._pool.open(parked.scope, capacity)
        self._unpark(parked, seq, n)
        return seq

    def _can_unpark(self, parked: Parked, evict: Evict) -> bool:
        """Whether its cells can be had now; idle sequences are evicted for them."""
        while self._pool.cells_free < len(parked.retained.kept):
            if not evict():
                return False
        return True

    def _unpark(self, parked: Parked, seq: LiveSeq, n: int) -> None:
        """Make the first `n` tokens of a chat that was parked the content of the empty sequence
        `seq`."""
        self._memory.append(seq.id, parked.blob, is_empty=True)
        self._pool.grow(seq, parked.n)
        seq.ids[: parked.n], seq.provenance[: parked.n] = parked.ids, parked.provenance
        seq.n = parked.n
        seq.live_set = parked.retained if n == parked.n else parked.retained.fork()
        self._pool.take(seq, len(parked.retained.kept))
        self._pool.truncate(seq, n)

    def kept(self, ids: Ids, scope: str) -> Kept | None:
        """What is kept of the chat whose tokens are `ids`, live or parked."""
        best: BoundedSet | None = None
        best_n = 0
        live = [(seq.tokens(), seq.scope, seq.live_set) for seq in self._pool]
        for tokens, its_scope, retained in [*live, *self.parked.entries()]:
            n = common_prefix(tokens, ids)
            if not isinstance(retained, BoundedSet) or its_scope != scope:
                continue
            if n < min(len(tokens), len(ids)):
                continue
            if n > best_n:
                best, best_n = retained, n
        if best is None:
            return None
        breaks = np.flatnonzero(np.diff(best.kept) > 1)
        starts = best.kept[np.concatenate([[0], breaks + 1])]
        ends = best.kept[np.concatenate([breaks, [len(best.kept) - 1]])] + 1
        runs = tuple(zip(starts.tolist(), ends.tolist(), strict=True))
        return Kept(best.budget.policy, best.budget.tokens, best.n, runs)

    def stats(self) -> dict[str, float]:
        """Counters and gauges; may be asked by any thread."""
        sets = [seq.live_set for seq in list(self._pool)]  # each is read once: it may go
        live = [each for each in sets if isinstance(each, BoundedSet)]
        parked = [retained for _, _, retained in self.parked.entries()]
        files = {file for retained in (*live, *parked) for file in retained.shelf.files}
        return {
            "retention_evictions": self.n_evictions,
            "retention_tokens_dropped": self.n_tokens_dropped,
            "retention_moves": self.n_moves,
            "retention_packed": self.n_packed,
            "parked_sequences": len(self.parked),
            "parked_bytes": self.parked.nbytes,
            "recall_bytes": sum(retained.n_bytes_aside for retained in live),
            "recall_disk_bytes": sum(file.n_bytes for file in files),
            **({} if self._recaller is None else self._recaller.stats()),
        }


def bounded(seq: LiveSeq) -> BoundedSet:
    """The live set of a sequence whose chat has a budget."""
    assert isinstance(seq.live_set, BoundedSet), "a chat with a budget has everything live"
    return seq.live_set


def runs_of(rows: KVRows) -> list[KVRows]:
    """The runs of consecutive positions of `rows`, as views."""
    positions = rows.positions.astype(np.int64)
    breaks = np.flatnonzero(np.diff(positions) > 1)
    starts: Iterable[int] = [rows.p0, *(int(positions[i + 1]) for i in breaks)]
    ends: Iterable[int] = [*(int(positions[i]) + 1 for i in breaks), rows.p1]
    return [rows.slice(p0, p1) for p0, p1 in zip(starts, ends, strict=True)]
