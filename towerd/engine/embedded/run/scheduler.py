"""The inference thread: continuous batching over the live sequences.

One pass of the loop: take commands and attach loaded rows, admit waiting jobs, decode one batch,
sample, deliver events, export some rows that the store lacks. The thread is the only one that
touches the context and changes the pool.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from towerd.engine.base import CLOSING, Piece
from towerd.engine.embedded.context.context import DecodeError, Interrupted, LlamaContext
from towerd.engine.embedded.context.memory import SequenceMemory
from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.live.pool import LivePool
from towerd.engine.embedded.restore.branching import FoundLive
from towerd.engine.embedded.restore.exporter import Exporter
from towerd.engine.embedded.restore.hooks import Hooks
from towerd.engine.embedded.restore.restorer import Loaded, Restorer, RowsMissing
from towerd.engine.embedded.run.background import (
    Background,
    Inbox,
    is_background,
    nothing_to_evict,
)
from towerd.engine.embedded.run.batching import Batching
from towerd.engine.embedded.run.cell_room import CellRoom
from towerd.engine.embedded.run.endings import Endings, Events
from towerd.engine.embedded.run.media import Media, Ready
from towerd.engine.embedded.run.shown_slots import ShownSlots
from towerd.engine.embedded.run.speculation import Speculator
from towerd.engine.served import ServedAnswer
from towerd.errors import TowerdError, Unavailable, unforeseen

log = logging.getLogger(__name__)

T = TypeVar("T")

_COUNTERS = ("decode_steps", "sequences_decoded", "tokens_decoded")
_INTERNAL = "Internal error in the inference thread; the daemon's log has it."
_CLOSE_WAIT_S = 10.0
"""How long a shutdown waits for finished turns to be recorded before it exports their rows."""
_CLOSE_POLL_S = 0.05
_PASSES_MAX = 8
"""Jobs that may begin before one that there is no room for: then all wait until there is."""


class Scheduler:
    """Runs jobs. `submit`, `cancel`, `release`, `call` and `close` may be called by any thread."""

    def __init__(
        self,
        context: LlamaContext,
        pool: LivePool,
        memory: SequenceMemory,
        restorer: Restorer,
        exporter: Exporter,
        hooks: Hooks,
        speculator: Speculator,
        media: Media,
        *,
        n_ctx: int,
        parallel: int,
        queue_max: int,
        deliver: Callable[[Events], None],
        standings: Callable[[], Mapping[int, float]],
    ) -> None:
        """deliver: hands events to their clients; standings: see `Ranking.live_standings`"""
        self.context = context
        self.pool = pool
        self.restorer = restorer
        self.hooks = hooks
        self.speculator = speculator
        self.media = media
        self.n_ctx = n_ctx
        self.parallel = parallel
        self.queue_max = queue_max
        self.active: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.slots = ShownSlots(parallel, n_ctx)
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._batching = Batching(context, is_even=context.is_tapped and memory.kind.has_state)
        self.room = CellRoom(pool, restorer, exporter, self.active, self.waiting, n_ctx, standings)
        self._endings = Endings(pool, restorer, self.room, self.active, self.slots.leave, deliver)
        self._inbox = Inbox()
        self.background = Background(
            memory,
            pool,
            restorer,
            self._inbox,
            lambda job: self._endings.finish(job, "cancelled"),
            self.room.drop_moved,
            self.room.evict_over,
        )
        self._closing = False
        self._close_deadline = 0.0
        self._stalled = False
        self._later: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="towerd-inference", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Raises Unavailable when the queue is full or the engine is closing."""
        if self._closing:
            raise Unavailable(CLOSING)
        if len(self.waiting) >= self.queue_max:
            raise Unavailable(f"{self.queue_max} requests are waiting already; try again later.")
        enter = self.background.add if is_background(job) else self.waiting.append
        self._inbox.put(lambda: enter(job))
        if not is_background(job):
            self.background.interrupt()

    def cancel(self, job: Job) -> None:
        """Stop a job at the next step; it still ends with a Finish event."""
        job.cancelled = True
        self._inbox.put(lambda: None)
        self.background.interrupt()

    def release(self, job: Job) -> None:
        """The job is recorded (or given up): its sequence may be exported, shared, evicted."""
        self._inbox.put(lambda: self._endings.release(job))

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` on the inference thread between two steps."""
        return self._inbox.call(work)

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait."""
        return bool(self.active or self.waiting)

    def call_with_room(
        self, work: Callable[[], T], n_cells: int, *, if_idle: bool = False
    ) -> Future[tuple[T] | None]:
        """As `call`, with `n_cells` cells free, for which idle chats are evicted: their rows stay in
        RAM. None if running requests hold the cells or, with `if_idle`, if any runs or waits."""

        def attempt() -> tuple[T] | None:
            if if_idle and self.is_busy:
                return None
            return (work(),) if self.pool.has_room(n_cells, self.room.evict_one) else None

        return self.call(attempt)

    def settled(self) -> Future[None]:
        """Done once no sequence is busy and none holds rows that the store lacks."""
        future: Future[None] = Future()

        def check() -> None:
            if any(s.dirty or s.busy for s in self.pool):
                self._later.append(check)
            elif future.set_running_or_notify_cancel():
                future.set_result(None)

        self._inbox.put(check)
        return future

    def close(self) -> None:
        """Cancel what runs, export what the store lacks, end the thread."""
        self._close_deadline = time.monotonic() + _CLOSE_WAIT_S
        self._closing = True
        self._inbox.put(lambda: None)
        self._thread.join()

    # ---- the loop ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._may_exit():
            try:
                self._pass()
            except Exception as error:
                # A bug here may end the requests that met it, never the daemon.
                log.exception("the inference thread failed; its running requests end")
                self._fail_all(error)
        while self.room.export_one():
            pass
        self._endings.flush()

    def _pass(self) -> None:
        """One turn of the loop."""
        self._take_commands()
        self._admit()
        self._drop_cancelled()
        self._bring()
        self.room.evict_surplus(sum(not is_background(job) for job in self.active))
        stepped = self._step()
        self._endings.flush()
        if stepped and all(job.phase is JobPhase.DECODE for job in self.active):
            self.restorer.pages.ask_spare()
        if not stepped or self.room.is_export_due:
            self.room.export_one()
        later, self._later = self._later, []
        for check in later:
            check()

    def _fail_all(self, error: Exception) -> None:
        self.context.batch.clear()
        for job in [*self.active, *self.waiting]:
            self._endings.fail(job, unforeseen(error, _INTERNAL))
        self.waiting.clear()
        self.background.drop(everything=True)
        self._endings.flush()

    def _take_commands(self) -> None:
        """Run every queued command; sleep until there is one when nothing else can be done."""
        block = not self._has_work()
        while True:
            try:
                timeout = _CLOSE_POLL_S if self._closing else None
                command = self._inbox.get(block=block, timeout=timeout)
            except queue.Empty:
                return
            block = False
            self._stalled = False
            command()

    def _has_work(self) -> bool:
        if any(j.phase in (JobPhase.PREFILL, JobPhase.DECODE) for j in self.active):
            return True
        may_begin = len(self.active) < self.parallel and not self._stalled
        if self.waiting and (self._closing or may_begin):
            return True
        return self.room.is_dirty or (len(self.background) > 0 and not self.active)

    def _may_exit(self) -> bool:
        """Closing, nothing runs, and every finished job is recorded (or its time is up)."""
        if not self._closing or self.active or self.waiting or self.background:
            return False
        busy = any(s.busy for s in self.pool)
        return not busy or time.monotonic() > self._close_deadline

    def _admit(self) -> None:
        """Start waiting jobs in order. One that waits for another's prefix lets others pass, and so
        does one that there is no room for, a few times."""
        self.background.drop(everything=self._closing)
        for gone in [job for job in self.waiting if self._closing or job.cancelled]:
            self._give_up(gone)
        if self.waiting:
            self.background.give_way(self.active)
        elif not self.active and not self.room.is_dirty and (quiet := self.background.next()):
            self.waiting.append(quiet)
        left_out: Job | None = None
        n_left = _PASSES_MAX
        for job in list(self.waiting):
            if len(self.active) >= self.parallel or n_left <= 0:
                break
            if left_out is not None:
                n_left -= 1
            found = self._find(job)
            if found is None:
                continue
            if self.restorer.is_coming(job, found, self.active):
                self._stalled = True
            elif self.room.can_begin(job, found) and self._begin(job, found):
                if left_out is not None:
                    left_out.n_passed += 1
            elif is_background(job):  # nothing is evicted for it: it would block the queue for ever
                self._give_up(job)
            else:
                self._stalled = True
                if left_out is None:
                    left_out, n_left = job, _PASSES_MAX - job.n_passed

    def _give_up(self, job: Job) -> None:
        """End a waiting job with what it has."""
        self.waiting.remove(job)
        self._endings.finish(job, "cancelled")

    def _find(self, job: Job) -> FoundLive | None:
        """What is live of a waiting job, which fits into its context from now on; None if it failed."""
        try:
            self.hooks.of_job(job).shorten(job, self.n_ctx)
            return self.restorer.find(job)
        except TowerdError as error:
            self.waiting.remove(job)
            self._endings.fail(job, error)
            return None

    def _begin(self, job: Job, found: FoundLive) -> bool:
        """Give the job a sequence with its live rows and start loading stored ones. False when no
        sequence is available now."""
        try:
            if not job.t_prompt:
                job.t_prompt = time.monotonic()
                if job.output is not None:
                    job.output.accept_prompt(job.ids)
            evict = nothing_to_evict if is_background(job) else self.room.evict_one
            if not self.restorer.begin(job, found, job.capacity(self.n_ctx), evict):
                return False
        except TowerdError as error:
            self.waiting.remove(job)
            self._endings.fail(job, error)
            return True
        if not is_background(job):
            self.slots.take(job, self.active)
        self.waiting.remove(job)
        self.active.append(job)
        if job.phase is JobPhase.LOADING:
            self.restorer.load(job, self._on_loaded)
        else:
            self._endings.emit_progress(job)
        return True

    def _on_loaded(self, job: Job, loaded: Loaded | TowerdError) -> None:
        """Called by a worker thread that has composed rows of `job`, or failed to."""
        self._inbox.put(lambda: self._isolated(job, lambda job: self._attach(job, loaded)))

    def _attach(self, job: Job, loaded: Loaded | TowerdError) -> None:
        if isinstance(loaded, TowerdError):
            if job.phase is JobPhase.LOADING:
                self._endings.fail(job, loaded)
            return
        if not job.awaits(loaded.load):
            self.restorer.discard(loaded)
            return
        try:
            if not self._make_room(job, loaded.n):
                self.restorer.discard(loaded)
                return
            self.restorer.attach(job, loaded)
            if loaded.is_last:
                self.restorer.drop_partial_medium(job)
            if not self._make_live_room(job):
                return
        except TowerdError as error:
            self.room.requeue(job) if isinstance(error, RowsMissing) else self._endings.fail(
                job, error
            )
            return
        if not loaded.is_last:
            return
        job.phase = JobPhase.PREFILL
        self._endings.emit_progress(job)

    def _make_room(self, job: Job, n_cells: int) -> bool:
        """Make room for rows of a running job; False if it was preempted itself."""
        while not self.room.make(n_cells):
            if job not in self.active:
                return False
        return True

    def _drop_cancelled(self) -> None:
        for job in list(self.active):
            if job.is_cancelled or self._closing:
                self._endings.finish(job, "cancelled")

    # ---- one batch --------------------------------------------------------------------------

    def _bring(self) -> None:
        """Start to move the rows, or to encode the medium, that is next in the prompt of a job."""
        for job in list(self.active):
            if job.phase is JobPhase.PREFILL and job.is_at_piece:
                job.phase = JobPhase.LOADING
                self._isolated(job, lambda job: self.restorer.move(job, self._on_loaded))
            elif job.phase is JobPhase.PREFILL and job.medium_at(job.n_live) is not None:
                job.phase = JobPhase.LOADING
                self._isolated(job, lambda job: self.media.encode(job, self._on_ready))

    def _on_ready(self, job: Job, ready: Ready) -> None:
        """Called when a medium is encoded, or could not be."""
        self._inbox.put(lambda: self._isolated(job, lambda job: self._evaluate(job, ready)))

    def _evaluate(self, job: Job, ready: Ready) -> None:
        if not job.awaits(ready.load):
            return
        if ready.medium is None and is_background(job):
            self._endings.finish(job, "cancelled")  # the tokens before it are evaluated
            return
        if not self.media.evaluate(job, ready, lambda n: self._make_room(job, n)):
            return
        self.counters["tokens_decoded"] += job.n_in_batch
        job.phase = JobPhase.PREFILL
        self._endings.emit_progress(job)

    def _step(self) -> bool:
        """Decode one batch and sample from it; False when there was nothing to decode."""
        self._before_step()
        jobs = self.speculator.fill(self._batching, self.active, self.room.evict_one)
        if not jobs:
            return False
        try:
            while not self.room.make(sum(j.n_in_batch for j in jobs)):
                jobs = self._batching.fill(self.active)
                if not jobs:  # the only job was preempted beside a turn that is not recorded yet
                    return True
            self.speculator.prepare(jobs)
            self.restorer.protect(jobs)
            started = time.monotonic()
            with (
                self.context.adapted(jobs[0].adapted),
                self.background.interruptible(jobs),
                self.hooks.evaluating(jobs),
            ):
                self.context.decode()
                self.speculator.evaluated()
            self._batching.learn(sum(j.n_in_batch for j in jobs), time.monotonic() - started)
        except TowerdError as error:
            self._decode_failed(jobs, error)
            return True
        self.counters["decode_steps"] += 1
        self.counters["sequences_decoded"] += len(jobs)
        for job in jobs:
            self._isolated(job, self._advance)
        return True

    def _before_step(self) -> None:
        """Make room in the live sets of the running jobs."""
        for job in list(self.active):
            if job.phase in (JobPhase.PREFILL, JobPhase.DECODE):
                self._isolated(job, self._make_live_room)

    def _make_live_room(self, job: Job) -> bool:
        """Make room in a running job's live set, whose rows may be shared: others give way, or it does. False
        if it was preempted itself."""
        while True:
            try:
                self.hooks.of_job(job).before_step(job, self.room.evict_one)
                return True
            except Unavailable:
                if self.pool.n_busy() < 2:
                    raise
                self.room.preempt()
                if job not in self.active:
                    return False

    def _isolated(self, job: Job, work: Callable[[Job], object]) -> None:
        """Run `work` for one job; an error fails that job alone."""
        try:
            work(job)
        except TowerdError as error:
            self._endings.fail(job, error)
        except Exception as error:
            log.exception("a request failed")
            self._endings.fail(job, unforeseen(error, _INTERNAL))

    def _advance(self, job: Job) -> None:
        """Account for the job's part of the batch; sample when its last token was in it."""
        assert job.seq is not None
        for position in job.compared:
            assert job.request.compare is not None
            logits = self.context.logits(job.batch_index + position - job.n_live)
            job.request.compare.compare(position, logits)
        self.pool.append(job.seq, job.in_batch)
        self.counters["tokens_decoded"] += job.n_in_batch
        self.restorer.advanced(job)
        if job.phase is JobPhase.PREFILL:
            self._endings.emit_progress(job)
            if job.logits_index < 0 or self.hooks.of_job(job).awaits_recall(job):
                return
            self._prompt_done(job)
        if job.phase is JobPhase.DECODE and job.logits_index >= 0:
            self._sample(job)

    def _prompt_done(self, job: Job) -> None:
        first = job.t_first == 0.0
        if first:
            self.hooks.of_job(job).prompt_done(job, self.room.evict_one)
            job.t_first = time.monotonic()
            self._endings.emit(job, job.started())
            if job.output is not None:
                n_cached = job.reuse.live + job.reuse.hot + job.reuse.warm
                prompt_ms = (job.t_first - job.t_prompt) * 1e3
                job.output.started(n_cached, job.reuse.prefill, prompt_ms)
            if job.seq is not None and job.seq.n_unmoved() < job.seq.n:
                job.served = ServedAnswer(job.n - 1)
        job.phase = JobPhase.DECODE
        if job.request.n_predict == 0:
            self._endings.finish(job, "limit")

    def _sample(self, job: Job) -> None:
        assert job.output is not None
        hook = self.hooks.of_job(job)
        may_outgrow, n_before = hook.may_outgrow, len(job.reply)
        for chunk in self.speculator.sample(job, self.context.address, may_outgrow=may_outgrow):
            if job.served is not None and not job.served.is_full:
                job.served.add(self.context.logits(job.logits_index + len(job.reply) - n_before))
            job.push(chunk.token)
            self._endings.emit(
                job, Piece(chunk.text.decode("utf-8", "replace"), (chunk.token,), chunk)
            )
        if chunk.stop:
            job.is_full = job.n >= self.n_ctx and not may_outgrow and chunk.stop == "limit"
            self._endings.finish(job, chunk.stop)
        elif len(job.reply) >= job.n_reply_max(self.n_ctx):
            self._endings.finish(job, "limit")
        elif job.n >= self.n_ctx and hook.restarts_shortened(job):
            self.room.requeue(job)

    def _decode_failed(self, jobs: list[Job], error: TowerdError) -> None:
        """Jobs of a refused batch fail, unless it was interrupted or lacked cells only."""
        self.context.batch.clear()
        if isinstance(error, Interrupted):
            return
        if isinstance(error, DecodeError) and error.code == 1 and self.pool.n_busy() > 1:
            self.room.preempt()
            return
        log.error("decode failed", extra={"error": str(error), "jobs": len(jobs)})
        for job in jobs:
            self._endings.fail(job, error)
