"""Thinner: keeps chats with a budget within it.

Before a step that would exceed the budget, the policy says what stays and the rest is dropped
from the context; positions keep their rotation, so holes are left. When a chat reaches the last
position of the context, what is live of it is moved together: keys are rotated to places without
holes, so that a chat may be longer than any context. Called by the inference thread only, but for
`check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from towerd.config import RETENTIONS, WATCHING
from towerd.engine.base import Ids, Kept, LiveBudget
from towerd.engine.embedded.core import Core
from towerd.engine.embedded.job import Job, Phase
from towerd.engine.embedded.observer import QUERIES_MAX
from towerd.engine.embedded.parked import Parked, ParkedTowers
from towerd.engine.embedded.pool import LivePool, LiveSeq, common_prefix
from towerd.engine.embedded.recall import (
    ASKED_AGAIN_TOKENS,
    ASKING_TOKENS_MAX,
    Recaller,
    RecallLimits,
    served,
)
from towerd.engine.embedded.retained import Beginning, Retained
from towerd.engine.embedded.splice import Splicer
from towerd.errors import InvalidRequest, NotSupported, Unavailable
from towerd.retention import Positions, Signal, can_recall, retention_config
from towerd.retention.icecache import IceCacheConfig
from towerd.slots.blob import emit_blob
from towerd.slots.kind import DENSE
from towerd.slots.rows import KVRows, join
from towerd.slots.shift import compose_at

_BUDGET_MIN = 16


class Thinner:
    """What happens to live sequences of chats that have a budget."""

    def __init__(
        self,
        core: Core,
        pool: LivePool,
        splicer: Splicer,
        parked_bytes_max: int,
        recall: RecallLimits,
        folder: Path,
    ) -> None:
        """folder: of the files with rows that chats may recall and RAM has no room for"""
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
        model can be kept within `budget`."""
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
        assert config.n_min <= Retained.whole(budget, 0, 0).n_target

    def may_outgrow(self, budget: LiveBudget) -> bool:
        """Whether a chat of this budget may be longer than the context: what is live of it can
        be moved together."""
        return budget.is_bounded and self._splicer.can_rotate

    def n_loadable(self, budget: LiveBudget, n_live: int) -> int:
        """Up to which token a chat with `n_live` live ones may load stored rows. What a policy
        that can recall has no room for goes to the shelf."""
        if can_recall(budget.policy):
            return max(n_live, self._core.n_ctx - 1)
        return max(n_live, min(budget.tokens, self.n_adoptable(budget)))

    def n_adoptable(self, budget: LiveBudget) -> int:
        """How many tokens a chat of this budget may have the rows of, from the store or from
        another chat, that were not evaluated for it. A policy that goes by attention needs the
        queries before the first eviction, which only an evaluation has; one that can recall asks
        again at the end of the prompt."""
        if budget.policy not in WATCHING or can_recall(budget.policy):
            return self._core.n_ctx
        return max(0, budget.tokens - QUERIES_MAX)

    def n_sharable(self, other: Job, job: Job) -> int:
        """How many of the first tokens of `other` its sequence can give to `job`: what was
        evaluated after an eviction is only for chats of the same budget."""
        own, live = other.request.live, job.request.live
        if own == live:
            return other.n
        n = min(other.n, own.tokens) if own.is_bounded else other.n
        return min(n, self.n_adoptable(live))

    # ---- a job's sequence ----------------------------------------------------------------

    def enter(self, job: Job, seq: LiveSeq) -> None:
        """`seq`, which is the job's from now on, gets the account that the job's budget wants."""
        budget = job.request.live
        if not budget.is_bounded:
            assert not seq.is_thinned, "a thinned sequence went to a request without a budget"
            seq.retained = None
        elif seq.retained is None or seq.retained.budget != budget:
            assert not seq.is_thinned, "a thinned sequence went to a request of another budget"
            config = retention_config(budget.policy, budget.tokens)
            if isinstance(config, IceCacheConfig):
                config = served(config, self._recall)
            seq.retained = Retained.whole(budget, seq.n, self._core.n_ctx, config)

    def make_room(self, job: Job, evict: Callable[[], bool]) -> None:
        """Make sure that `job` can evaluate a token. `evict` frees an idle sequence.

        Raises Unavailable when no cells can be had to move the chat together."""
        seq = job.seq
        assert seq is not None
        retained = seq.retained
        if retained is None:
            return
        if seq.n + 1 > len(seq.ids):
            self._pool.grow(seq, seq.n + max(retained.budget.tokens, seq.n // 4))
        if retained.can_recall:
            self._choose(job, seq, retained, evict)
        elif len(retained.kept) >= retained.budget.tokens:
            self._evict(job, seq, retained)
        if retained.place_next >= retained.n_places and self.may_outgrow(retained.budget):
            self._move(seq, retained, evict)

    def is_asking(self, job: Job) -> bool:
        """Whether the job's prompt, which is evaluated, shall be asked first what it looks for:
        then `make_room` takes back its last tokens, to be evaluated again."""
        retained = None if job.seq is None else job.seq.retained
        if retained is None or not retained.can_recall or job.was_asked:
            return False
        return retained.is_thinned and job.n_live == job.n_prompt and job.request.n_predict != 0

    def watch(self, jobs: Iterable[Job]) -> None:
        """The next batch is that of `jobs`, in their order."""
        if self._observer is not None:
            self._observer.watch((job, self._n_wanted(job)) for job in jobs)

    def decode(self, jobs: Iterable[Job]) -> None:
        """Evaluate the batch, which is that of `jobs`; beside it, what of their chats has left the
        windows enters the indexes. Raises DecodeError."""
        if self._recaller is None:
            self._core.context.decode()
            return
        with self._recaller.indexing(jobs):
            self._core.context.decode()

    def close(self) -> None:
        """End the threads. No job may run any more."""
        if self._recaller is not None:
            self._recaller.close()

    def _n_wanted(self, job: Job) -> int:
        """How many of the job's tokens in the batch, its last ones, will be asked what they attend
        to when its chat has to be thinned next."""
        retained = None if job.seq is None else job.seq.retained
        if retained is None or not retained.policy.signals:
            return 0
        n_max, ahead = QUERIES_MAX, retained.room
        if retained.can_recall and self._recaller is not None:
            n_max, ahead = ASKING_TOKENS_MAX, self._recaller.n_ahead(job, retained)
        n_after = max(0, ahead - job.n_in_batch)
        return max(0, min(job.n_in_batch, n_max - n_after))

    def observe(self, job: Job) -> None:
        """The job's part of the batch was evaluated."""
        if self._observer is not None:
            self._observer.observe(job)

    def _evict(self, job: Job, seq: LiveSeq, retained: Retained) -> None:
        if self._observer is not None and retained.policy.signals:
            self._observer.measure(seq, retained)
        has_messages = Signal.MESSAGES in retained.policy.signals
        view = retained.view(self._messages(job, seq.n) if has_messages else None)
        stay = retained.policy.keep(view, retained.n_target)
        self._keep_beginning(seq, retained)
        n_dropped = self._pool.thin(seq, stay)
        self.n_evictions += 1
        self.n_tokens_dropped += n_dropped
        self._pack(seq, retained, n_dropped)

    def _keep_beginning(self, seq: LiveSeq, retained: Retained) -> None:
        """Before the first eviction: copy what the store may have of the chat."""
        rows = None if retained.is_thinned else self._memory.rows(seq.id, 0, seq.n)
        if rows is not None:
            ids, taint = seq.tokens().copy(), seq.taint[: seq.n].copy()
            retained.exact = Beginning(ids, taint, rows)

    def _pack(self, seq: LiveSeq, retained: Retained, n_dropped: int) -> None:
        """What is left of a long chat lies scattered over its cells, and every step goes over all
        cells up to the last one in use: after a large eviction it is written together."""
        if n_dropped < retained.budget.tokens or any(run.owners != {seq.id} for run in seq.runs):
            return
        blob = self._core.context.get_state(seq.id)
        self._pool.let_go(seq)
        self._memory.append(seq.id, blob, is_empty=True)
        self._pool.take(seq, len(retained.kept))
        self.n_packed += 1

    def _choose(
        self, job: Job, seq: LiveSeq, retained: Retained, evict: Callable[[], bool]
    ) -> None:
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

    def _move(self, seq: LiveSeq, retained: Retained, evict: Callable[[], bool]) -> None:
        """Go on with a chat that has reached the last place of its context."""
        if retained.can_recall and self._recaller is not None:
            self._recaller.move_down(seq, retained, self._splicer.rope(), evict)
        else:
            self._move_together(seq, retained, evict)
        self.n_moves += 1

    def _move_together(self, seq: LiveSeq, retained: Retained, evict: Callable[[], bool]) -> None:
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

    def park(self, seq: LiveSeq) -> None:
        """Keep what is live of a thinned sequence that is about to be dropped; not if its index
        is broken, for then nobody could go on with it."""
        assert seq.retained is not None
        if seq.retained.failure is not None:
            return
        blob = self._core.context.get_state(seq.id)
        ids, taint = seq.tokens().copy(), seq.taint[: seq.n].copy()
        self.parked.add(Parked(seq.scope, seq.session, ids, taint, seq.retained, blob))

    def can_unpark(self, parked: Parked, evict: Callable[[], bool]) -> bool:
        """Whether its cells can be had now; idle sequences are evicted for them."""
        while self._pool.cells_free < len(parked.retained.kept):
            if not evict():
                return False
        return True

    def unpark(self, parked: Parked, seq: LiveSeq, n: int) -> None:
        """Make the first `n` tokens of a chat that was parked the content of the empty sequence
        `seq`. Needs `can_unpark`."""
        self._memory.append(seq.id, parked.blob, is_empty=True)
        self._pool.grow(seq, parked.n)
        seq.ids[: parked.n], seq.taint[: parked.n] = parked.ids, parked.taint
        seq.n = parked.n
        seq.retained = parked.retained if n == parked.n else parked.retained.fork()
        self._pool.take(seq, len(parked.retained.kept))
        self._pool.truncate(seq, n)

    def kept(self, ids: Ids, scope: str) -> Kept | None:
        """What is kept of the chat whose tokens are `ids`, live or parked."""
        best: Retained | None = None
        best_n = 0
        candidates = [(seq.tokens(), seq.scope, seq.retained) for seq in self._pool]
        for tokens, its_scope, retained in [*candidates, *self.parked.entries()]:
            n = common_prefix(tokens, ids)
            if retained is None or its_scope != scope or n < min(len(tokens), len(ids)):
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
        accounts = [seq.retained for seq in list(self._pool)]  # each is read once: it may go
        live = [retained for retained in accounts if retained is not None]
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


def runs_of(rows: KVRows) -> list[KVRows]:
    """The runs of consecutive positions of `rows`, as views."""
    positions = rows.positions.astype(np.int64)
    breaks = np.flatnonzero(np.diff(positions) > 1)
    starts: Iterable[int] = [rows.p0, *(int(positions[i + 1]) for i in breaks)]
    ends: Iterable[int] = [*(int(positions[i]) + 1 for i in breaks), rows.p1]
    return [rows.slice(p0, p1) for p0, p1 in zip(starts, ends, strict=True)]
