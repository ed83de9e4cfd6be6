"""Towers in and out of the live context.

In: what is live is shared, what is stored is composed into one blob by a worker thread and
appended by the inference thread, the rest is left to prefill. Out: rows that the store lacks are
exported. Both cost O(delta): `seq_cp` of a range into a scratch sequence moves no bytes in a
unified cache, and the state calls then see only that range.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from towerd.engine.base import GenerateRequest, Reuse
from towerd.engine.embedded.context import Buffer
from towerd.engine.embedded.job import Job, Phase, Saved
from towerd.engine.embedded.memory import Memory
from towerd.engine.embedded.parked import Parked
from towerd.engine.embedded.pool import LivePool, LiveSeq, common_prefix
from towerd.engine.embedded.resume import LoadedState, Resumer
from towerd.engine.embedded.shift import shift_ids
from towerd.engine.embedded.splice import Piece, Splicer
from towerd.engine.embedded.thinning import Thinner
from towerd.errors import TowerdError
from towerd.media_ids import whole
from towerd.store import APPROXIMATE, DERIVED, SPLICED, Taint
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import Composed, Plan

log = logging.getLogger(__name__)

_SHARE_TOKENS_MIN = 32
"""A prompt waits for another's prefill when that will give it this many tokens more."""
_BLOBS_AHEAD = 2
"""Blobs that may wait for the inference thread; more would only use memory."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Rows ready to append for load number `load` of a job; `is_last` ends that load.

    `composed` from the store, or `blob` alone: a preempted job's own rows."""

    load: int
    taint: Taint | None
    """What the rows of each token are; None without rows."""
    blob: Buffer | None
    composed: Composed | None
    is_last: bool
    slot: threading.Semaphore | None = None
    piece: Piece | None = None
    """What was to be spliced in: `blob` has its rows, None if they cannot be had."""

    state: LoadedState | None = None
    """The boundary state to end the load with: `taint` is then that of tokens without rows."""
    saved: Saved | None = None
    is_short: bool = False
    """Rows that were planned turned out to be damaged or gone."""

    @property
    def n(self) -> int:
        """Tokens that these stand for."""
        return 0 if self.taint is None else len(self.taint)


class RowsMissing(TowerdError):
    """Half of what a boundary state needs came; the job has to begin again."""


class Materialiser:
    """Towers of one memory. `resumer` is there exactly if the memory has a state."""

    def __init__(
        self,
        memory: Memory,
        pool: LivePool,
        tiers: Tiers,
        splicer: Splicer,
        thinner: Thinner,
        resumer: Resumer | None,
    ) -> None:
        self.memory = memory
        self.pool = pool
        self.tiers = tiers
        self.splicer = splicer
        self.thinner = thinner
        self.resumer = resumer
        self.bytes_in = 0
        self.bytes_out = 0
        self._plans: dict[int, Plan] = {}
        self._workers = ThreadPoolExecutor(2, "towerd-compose")

    def close(self) -> None:
        self._workers.shutdown()
        self.thinner.close()

    @property
    def can_take_back(self) -> bool:
        """Whether rows that leave the context can be had again without evaluating them."""
        return self.memory.kind.has_rows and self.tiers.hot_bytes_max > 0

    # ---- in ---------------------------------------------------------------------------------

    def begin(self, job: Job, capacity: int, evict: Callable[[], bool]) -> bool:
        """Give `job` a busy sequence holding its live prefix; set its phase and reuse.

        At least the last prompt token is left to decode: restored rows carry no logits.
        `evict` frees one idle sequence or says that there is none. False: no sequence."""
        seq = self._sequence(job, capacity, evict)
        if seq is None:
            return False
        seq.busy = True
        seq.session = job.request.session
        job.seq = seq
        self.pool.touch(seq)
        self.thinner.enter(job, seq)
        plan = self._plan(job, seq)
        if job.saved is None:  # else it goes on where it was
            bounded = job.request.live.is_bounded
            job.splice = None if bounded else self.splicer.plan(job, seq, plan.n, self._workers)
            job.n_loaded_hot = job.n_loaded_warm = 0
            if not job.t_first and not (job.gave_way and seq.is_thinned):
                self._report(job, seq.n, plan.n_hot, plan.n_warm, plan.n_approximate)
        elif not job.t_first and (job.splice is None or not job.splice.counted):
            self._restate(job, job.saved.taint)
        if plan.n or job.saved is not None:
            self._plans[id(job)] = plan
            job.phase = Phase.LOADING
            seq.is_whole = self.resumer is None
        else:
            job.phase = Phase.PREFILL
        return True

    def load(self, job: Job, on_loaded: Callable[[Job, Loaded | TowerdError], None]) -> None:
        """Compose what `begin` planned on a worker thread; `on_loaded` is called there, for one
        blob at a time, and last with `is_last` or an error."""
        plan = self._plans.pop(id(job))
        job.loads += 1
        load = job.loads
        if job.saved is not None:
            saved, job.saved = job.saved, None
            on_loaded(job, Loaded(load, saved.taint, saved.blob, None, True, saved=saved))
            return

        def work() -> None:
            try:
                slot = threading.Semaphore(_BLOBS_AHEAD)
                state = None if self.resumer is None else self.resumer.load(plan)
                n = 0
                for composed in self.tiers.compose(plan) if state or not self.resumer else ():
                    slot.acquire()
                    rows = composed.taint, composed.blob, composed
                    on_loaded(job, Loaded(load, *rows, False, slot))
                    n += composed.n
                last = Loaded(load, None, None, None, True)
                if state is not None:
                    is_short = n + len(state.taint) < plan.n
                    last = replace(last, state=state, taint=state.taint, is_short=is_short)
                on_loaded(job, last)
            except TowerdError as error:
                on_loaded(job, error)
            except Exception as error:
                log.exception("composing stored rows failed")
                message = f"Composing stored rows failed: {error}"
                public = "Composing stored rows failed; the daemon's log has it."
                on_loaded(job, TowerdError(message, public=public))

        self._workers.submit(work)

    def splice(self, job: Job, on_loaded: Callable[[Job, Loaded | TowerdError], None]) -> None:
        """Load the rows to be spliced in where `job` stands; `on_loaded` is called once."""
        assert job.splice is not None
        piece, load = job.splice.pieces[0], job.loads + 1
        job.loads = load

        def tell(blob: Buffer | None) -> None:
            taint = None if blob is None else piece.taint
            on_loaded(job, Loaded(load, taint, blob, None, True, piece=piece))

        piece.when_ready(tell)

    def attach(self, job: Job, loaded: Loaded) -> None:
        """Append loaded rows to the job's sequence. Raises TowerdError if llama.cpp refuses."""
        seq = job.seq
        assert seq is not None
        if loaded.piece is not None and loaded.blob is None and job.splice is not None:
            job.splice.drop(loaded.piece.placed)
            return
        try:
            if loaded.is_short:
                raise RowsMissing("stored rows turned out to be gone")
            if loaded.blob is not None and loaded.taint is not None:
                self.memory.append(seq.id, loaded.blob, is_empty=seq.n == 0)
                self.bytes_in += len(loaded.blob)
                ids = job.ids[seq.n : seq.n + loaded.n]
                self.pool.append(seq, ids, loaded.taint)
            if loaded.saved is not None:
                loaded.saved.give_back(seq)
            if loaded.state is not None and self.resumer is not None:
                self.bytes_in += len(loaded.state.data)
                try:
                    self.resumer.attach(job, seq, loaded.state)
                except TowerdError as error:
                    raise RowsMissing(f"a boundary state was refused: {error}") from error
            seq.is_whole = seq.is_whole or loaded.is_last
        except RowsMissing as error:
            log.warning("a prompt is taken up again", extra={"reason": str(error)})
            job.n_broken += 1
            raise
        else:
            if loaded.piece is not None:
                self.splicer.attached(job, loaded.piece)
            if loaded.composed is not None:
                job.n_loaded_hot += loaded.composed.n_hot
                job.n_loaded_warm += loaded.composed.n_warm
            elif loaded.is_last and not job.t_first and loaded.blob is None and not loaded.n:
                # Rows that turned out damaged or gone are prefilled: report what really came.
                self._report(job, job.reuse.live, job.n_loaded_hot, job.n_loaded_warm, 0)
        finally:
            self.discard(loaded)

    def end_whole(self, job: Job) -> None:
        """A load has ended: rows that came of only a part of a medium are let go again, for it is
        evaluated as a whole. Raises RowsMissing where rows cannot be taken back."""
        seq = job.seq
        assert seq is not None
        n = whole(job.media, seq.n)
        if n == seq.n:
            return
        if self.resumer is not None:
            job.n_broken += 1
            raise RowsMissing("stored rows end within a medium")
        self.pool.truncate(seq, n)

    def is_coming(self, job: Job, active: Iterable[Job]) -> bool:
        """A running prompt will soon have a much longer prefix of this one live: wait for it."""
        if not job.request.cache_prompt:
            return False
        have = self.n_at_hand(job)
        for other in active:
            if (
                other.phase in (Phase.LOADING, Phase.PREFILL)
                and other.request.scope == job.request.scope
            ):
                common = common_prefix(other.ids[: self.thinner.n_sharable(other, job)], job.ids)
                if common >= have + _SHARE_TOKENS_MIN and other.n_live < common:
                    return True
        return False

    def discard(self, loaded: Loaded) -> None:
        """Give back the buffer of rows that were attached or are not wanted any more."""
        if loaded.composed is not None:
            self.tiers.recycle(loaded.composed)
        if loaded.slot is not None:
            loaded.slot.release()

    def _report(self, job: Job, live: int, hot: int, warm: int, n_approximate: int) -> None:
        """Set the job's reuse; `n_approximate`: tokens, beside the live ones, that are so."""
        assert job.seq is not None
        n_rest = job.n_prompt - live - hot - warm
        reuse = Reuse(live, hot, warm, n_rest, n_approximate + job.seq.n_approximate())
        if reuse.approximate:
            reuse = replace(reuse, drift=self.splicer.drift(job, job.seq, reuse))
        job.reuse = reuse

    def _restate(self, job: Job, saved: Taint) -> None:
        """Correct the reuse of a job that gave way, maybe before all planned rows had come; from
        here on it evaluates what it has not got. `saved`: the taint of what it has."""
        hot, warm, live = job.n_loaded_hot, job.n_loaded_warm, job.reuse.live
        n_approximate = int(np.isin(saved, (APPROXIMATE, SPLICED)).sum())
        job.reuse = replace(
            job.reuse,
            hot=hot,
            warm=warm,
            prefill=job.n_prompt - live - hot - warm,
            approximate=n_approximate,
            drift=job.reuse.drift if n_approximate else None,
        )

    def _plan(self, job: Job, seq: LiveSeq) -> Plan:
        if job.saved is not None:
            return Plan.nothing()
        if self.resumer is not None:
            return self.resumer.plan(job, seq)
        if not job.request.cache_prompt or seq.is_thinned:
            return Plan.nothing()
        stop = whole(job.media, job.n - 1)
        if job.request.live.is_bounded:
            stop = min(stop, self.thinner.n_loadable(job.request.live, seq.n))
        plan = self.tiers.plan(job.ids[:stop], job.request.scope, seq.n)
        seq.n_public = plan.n_public
        n_whole = whole(job.media, seq.n + plan.n)
        if n_whole < seq.n + plan.n:
            plan = self.tiers.plan(job.ids[:n_whole], job.request.scope, seq.n)
        return plan

    def _sequence(self, job: Job, capacity: int, evict: Callable[[], bool]) -> LiveSeq | None:
        if self.resumer is not None:
            return self.resumer.sequence(job, capacity, evict)
        source, n = self._source(job)
        parked, n_parked = self._parked(job)
        if parked is not None and n_parked > n:
            return self._unparked(parked, n_parked, capacity, evict)
        if source is not None and self._can_take_over(source, n, job):
            self.pool.grow(source, capacity)
            return source
        if source is not None:
            was_busy, source.busy = source.busy, True
            try:
                if self._can_open(evict):
                    return self.pool.branch(source, n, job.request.scope, capacity)
            finally:
                source.busy = was_busy
            if was_busy:
                return None
            # The only idle sequence is the source itself: keep what is shared and go on in it.
            self.export(source)
            self.pool.truncate(source, n)
            source.scope = job.request.scope
            self.pool.grow(source, capacity)
            return source
        return self.pool.open(job.request.scope, capacity) if self._can_open(evict) else None

    def _source(self, job: Job) -> tuple[LiveSeq | None, int]:
        if not job.request.cache_prompt or job.saved is not None:
            return None, 0
        source, n = self._best_prefix(job)
        n = whole(job.media, n)
        if source is not None and n < source.n and not self.memory.can_branch(source.id, n):
            return None, 0
        return source, n

    def n_at_hand(self, job: Job) -> int:
        """How many of the job's tokens it could go on from now, without what is stored."""
        if job.saved is not None:
            return len(job.saved.taint)
        return max(self._source(job)[1], self._parked(job)[1])

    def _parked(self, job: Job) -> tuple[Parked | None, int]:
        """The chat of this budget that left the context to go on from, and from which token."""
        request = job.request
        if not request.live.is_bounded or not request.cache_prompt or job.saved is not None:
            return None, 0
        return self.thinner.parked.best(job.ids[: job.n - 1], request.scope, request.live)

    def _unparked(
        self, parked: Parked, n: int, capacity: int, evict: Callable[[], bool]
    ) -> LiveSeq | None:
        """The first `n` tokens of a parked chat in a sequence of their own; None if there is none,
        or no cells for it. Where that is not all of it, the chat stays parked as well."""
        self.thinner.parked.take(parked)  # what is evicted for it could push it out
        is_possible = self._can_open(evict) and self.thinner.can_unpark(parked, evict)
        if not is_possible or n < parked.n:
            self.thinner.parked.add(parked)
        if not is_possible:
            return None
        seq = self.pool.open(parked.scope, capacity)
        self.thinner.unpark(parked, seq, n)
        return seq

    def _best_prefix(self, job: Job) -> tuple[LiveSeq | None, int]:
        """The live sequence to go on from. What was spliced into it counts as long as the store
        has no exact rows instead, and never for a prompt that is to be stored."""
        ids, scope = job.ids[: job.n - 1], job.request.scope
        if job.request.precache is not None:
            return self.pool.best_prefix(ids, scope, unspliced=True)
        if job.request.live.is_bounded:
            own, n_own = self.pool.best_budgeted(ids, scope, job.request.live)
            n_max = self.thinner.n_adoptable(job.request.live)
            whole, n_whole = self.pool.best_prefix(ids[:n_max], scope)
            return (own, n_own) if n_own > n_whole else (whole, n_whole)
        source, n = self.pool.best_prefix(ids, scope)
        if source is None or source.n_unspliced() >= n:
            return source, n
        exact, n_exact = self.pool.best_prefix(ids, scope, unspliced=True)
        if n_exact + self.tiers.plan(ids, scope, n_exact).n >= n:
            return exact, n_exact
        return source, n

    def _can_take_over(self, source: LiveSeq, n: int, job: Job) -> bool:
        return not source.busy and n == source.n and source.scope == job.request.scope

    def _can_open(self, evict: Callable[[], bool]) -> bool:
        return self.pool.can_open() or evict()

    # ---- out --------------------------------------------------------------------------------

    def export(self, seq: LiveSeq) -> None:
        """Hand rows of recorded tokens that the store lacks to the hot tier."""
        seq.dirty = False
        if not seq.n:
            return
        if self.resumer is not None:
            self.resumer.export(seq)
        if not self.memory.kind.has_rows:
            return
        if seq.is_thinned:
            self._export_beginning(seq)
            return
        taint = seq.taint[: seq.n]
        for gap in self.tiers.gaps(seq.tokens(), seq.scope, taint):
            rows = self.memory.rows(seq.id, gap.p0, gap.p1)
            if rows is None:
                continue
            self.bytes_out += rows.nbytes
            derived = bool((taint[gap.p0 : gap.p1] == DERIVED).any())
            self.tiers.accept(gap, rows, derived=derived)

    def _export_beginning(self, seq: LiveSeq) -> None:
        """Of a thinned sequence only the rows from before its first eviction are what prefill
        computes; of the tokens after it the store has the ids alone."""
        assert seq.retained is not None
        exact, seq.retained.exact = seq.retained.exact, None
        if exact is None:
            return
        ids, taint, rows = exact.ids, exact.taint, exact.rows
        derived = bool((taint == DERIVED).any())
        self.tiers.cut(ids, seq.scope)  # it ends within a turn, if the first prompt was too long
        for gap in self.tiers.gaps(ids, seq.scope, taint):
            part = rows.slice(gap.p0, gap.p1)
            self.bytes_out += part.nbytes
            self.tiers.accept(gap, part.copy(), derived=derived)

    def drop(self, seq: LiveSeq) -> None:
        """Take a sequence out of the context; what nothing else has of it is kept in RAM."""
        try:
            if seq.is_thinned:
                self.thinner.park(seq)
        except Exception:
            log.exception("a chat with a budget is not kept in RAM; it will be evaluated again")
        self.pool.drop(seq)

    def protect(self, jobs: Iterable[Job]) -> None:
        """Keep the jobs' rows through the decode of their parts of the batch, in this order."""
        jobs = list(jobs)
        self.thinner.watch(jobs)
        for job in jobs:
            assert job.seq is not None
            self.memory.protect(job.seq.id, job.seq.n, job.n_in_batch)

    def advanced(self, job: Job) -> None:
        """See what the job's part of the batch attended to; take a boundary state where it has
        evaluated its prompt up to one of its marks."""
        self.thinner.observe(job)
        if job.seq is not None and job.seq.n in job.marks and self.resumer is not None:
            self.resumer.capture(job.seq)

    def left(self, job: Job) -> None:
        """Give up the sequence of a job that ends while it is being loaded, if the rows that
        came are of no use without their boundary state."""
        if job.seq is not None and not job.seq.is_whole:
            self.pool.drop(job.seq)
            job.seq = None

    def released(self, seq: LiveSeq) -> None:
        """Its job is recorded: it may be exported, shared, evicted; where it ends is a boundary."""
        seq.busy = False
        seq.dirty = True
        if self.resumer is not None and seq.n:
            self.resumer.capture(seq)

    # ---- context shift ----------------------------------------------------------------------

    def shift(self, job: Job, n_ctx: int) -> None:
        """Shorten `job.ids` for a full context; the kept tail is prefilled again, exactly."""
        job.ids = shift_ids(job.ids, n_ctx, self.n_keep(job.request))
        job.n_prompt = min(job.n_prompt, len(job.ids))
        job.truncated = True

    def n_keep(self, request: GenerateRequest) -> int:
        """How many leading tokens a context shift spares: the request's wish, or its base."""
        if request.n_keep < 0:
            return len(request.ids)
        return request.n_keep or self.tiers.base_tokens(request.ids, request.scope)
