"""Restorer: makes the known prefix of a prompt live.

Live rows are shared. Stored rows are composed into blobs by a worker thread and appended by the
inference thread. The rest is left to prefill. The cost is O(delta): `seq_cp` of a range moves no
bytes in a unified cache.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from towerd.engine.base import Reuse
from towerd.engine.embedded.context.cell_pages import CellPages
from towerd.engine.embedded.context.memory import SequenceMemory
from towerd.engine.embedded.context.places import Places
from towerd.engine.embedded.context.sequences import Buffer
from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.live.pool import LivePool, LiveSeq
from towerd.engine.embedded.live.saved import save
from towerd.engine.embedded.restore.branching import (
    NOTHING_FOUND,
    Evict,
    FoundLive,
    has_everything,
)
from towerd.engine.embedded.restore.checkpoints import Checkpoints
from towerd.engine.embedded.restore.hooks import Hooks
from towerd.engine.embedded.restore.moved import MovedJobs
from towerd.engine.live_index import Found, LiveIndex
from towerd.engine.moving.moves import MovedRows
from towerd.errors import TowerdError, unforeseen
from towerd.media_ids import whole
from towerd.slots.labels import Labels, label_places
from towerd.slots.rows import HeadRows
from towerd.store.rows.checkpoints import StateCheckpoint
from towerd.store.tree.scope import tenant_of
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import NOTHING, Composed, RestorePlan
from towerd.tokens import Provenance, Provenances

log = logging.getLogger(__name__)

_SHARE_TOKENS_MIN = 32
"""A prompt waits for another's prefill if it gains at least this many tokens by it."""
_COPIES = 2
"""How often rows are in RAM while they are copied out of the context."""
_BLOBS_AHEAD = 1
"""Blobs that may wait for the inference thread; more would only use memory."""


def _nothing() -> Provenances:
    return np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is ready to append for load number `load` of a job: rows from the store, those of a piece
    that is moved, or, at the end of a load, a state."""

    load: int
    blob: Buffer | None = None
    provenance: Provenances = field(default_factory=_nothing)
    """uint8[n]: the provenance of each token that `blob` covers."""
    n_hot: int = 0
    """Tokens of the store that came from RAM."""
    n_warm: int = 0
    """Tokens of the store that came from files."""
    is_last: bool = True
    """It ends the load."""
    composed: Composed | None = None
    """The source of `blob`, to be recycled."""
    slot: threading.Semaphore | None = None
    is_piece: bool = False
    """It is the job's next piece."""
    moved: MovedRows | None = None
    """The rows of the piece; None if they cannot be read."""
    checkpoint: StateCheckpoint | None = None
    """The state checkpoint that ends the load: `blob` is its state, and `provenance` that of the
    tokens that it covers without rows."""
    is_short: bool = False
    """Rows that were planned turned out to be damaged or gone."""

    @property
    def n(self) -> int:
        """Tokens that `blob` covers."""
        return len(self.provenance)


class RowsMissing(TowerdError):
    """Only a part of the rows before a state checkpoint came; the job has to begin again."""


class Restorer:
    """Makes the known prefixes of prompts live. `checkpoints` is None for a memory without a
    state."""

    def __init__(
        self,
        memory: SequenceMemory,
        pages: CellPages,
        pool: LivePool,
        tiers: Tiers,
        moved: MovedJobs,
        hooks: Hooks,
        checkpoints: Checkpoints | None,
    ) -> None:
        self.bytes_in = 0
        self._memory = memory
        self.pages = pages
        self._pool = pool
        self._tiers = tiers
        self._moved = moved
        self._hooks = hooks
        self._checkpoints = checkpoints
        self._plans: dict[int, RestorePlan] = {}
        self._workers = ThreadPoolExecutor(2, "towerd-compose")

    def close(self) -> None:
        """End the threads. No job may run any more."""
        self._workers.shutdown()
        self.pages.close()

    @property
    def can_restore_evicted(self) -> bool:
        """Whether rows that leave the context can be restored without evaluating them again."""
        return self._memory.kind.has_rows and self._tiers.hot_bytes_max > 0

    # ---- in ---------------------------------------------------------------------------------

    def find(self, job: Job) -> FoundLive:
        """What is live to continue from, or, for a preempted job that had more, the sequence whose
        cells its rows can share. Asked anew in each pass until the job begins."""
        if not job.request.cache_prompt:
            return NOTHING_FOUND
        found, saved = self._hooks.of_job(job).find(job), job.saved
        if saved is None or found.n >= saved.n:
            return found
        n_common = max(found.n_common, saved.n)
        shared = self._pool.index.longest(saved.ids, saved.scope, has_everything)
        source, n = shared.source, shared.n
        if saved.state is not None:  # it is restored behind the last row, which is put back
            n = min(n, saved.n - 1)
        n = whole(job.media, n)
        if isinstance(source, LiveSeq) and saved.can_extend(source, n):
            if n == source.n or self._memory.can_branch(source.id, source.place_of(n)):
                return Found(source, n, n_common)
        return Found(n_common=n_common)

    def n_shared(self, job: Job, found: FoundLive) -> int:
        """How many of the cells that the job needs are cells of running jobs."""
        if job.n > job.n_cells:  # it evicts tokens, and then has rows of its own
            return 0
        source, n = found.source, found.n
        if not isinstance(source, LiveSeq) or not (self._memory.kind.has_rows or n == source.n):
            return 0
        return self._pool.n_busy_cells(source, n)

    def begin(self, job: Job, found: FoundLive, capacity: int, evict: Evict) -> bool:
        """Give `job` a busy sequence with the longest of what was found live of its prefix and what it
        had before it was preempted, and plan to load what the store has beyond that; set its phase and
        reuse.

        At least the last prompt token is left to decode: restored rows carry no logits.
        `evict` frees one idle sequence, if there is one. Returns False if there is no sequence, or
        there are no cells for what it had."""
        hook = self._hooks.of_job(job)
        prefetched = _prefetched(found)
        seq = hook.open(job, found, capacity, evict)
        if seq is None:
            return False
        seq.busy = True
        hook.enter(job, seq)
        if job.saved is not None and not self._pool.has_room(job.saved.n - seq.n, evict):
            seq.busy = False
            return False
        seq.session = job.request.session
        job.seq = seq
        self._pool.touch(seq)
        self._note_prefetched(job, *prefetched)
        try:
            continues = self._put_back(job, seq) or (job.n_preempted > 0 and seq.is_partial)
        except TowerdError as error:
            log.warning("a preempted prompt begins again", extra={"reason": str(error)})
            self._pool.drop(seq)
            return self.begin(job, self.find(job), capacity, evict)
        plan = hook.plan(job, seq, found)
        if plan.n:
            self.pages.ask(self._pool.cells_used + plan.n)
        job.moves = self._moved.plan(job, seq, plan.n, self._workers) if hook.can_move else None
        if not continues:
            job.n_loaded_hot = job.n_loaded_warm = 0
        elif job.moves is not None:
            job.moves.n_checked, job.moves.n_refused = job.reuse.checked, job.reuse.refused
        if not job.t_first:
            hot, warm = job.n_loaded_hot + plan.n_hot, job.n_loaded_warm + plan.n_warm
            before = job.reuse if continues else Reuse()
            live = before.live if continues else seq.n
            self._report(job, live, hot, warm, plan)
            job.reuse = replace(
                job.reuse, moved=before.moved, checked=before.checked, refused=before.refused
            )
        if plan.n:
            self._plans[id(job)] = plan
            job.phase = JobPhase.LOADING
            seq.is_whole = self._checkpoints is None
        else:
            job.phase = JobPhase.PREFILL
        return True

    def _note_prefetched(self, job: Job, source: LiveSeq | None, share: float) -> None:
        """A job begins that is a prefetch, or continues from this share of one."""
        seq = job.seq
        assert seq is not None
        if job.request.prefetch is not None:
            if seq.prefetch is not job.request.prefetch:  # else it was interrupted
                seq.prefetch, seq.n_before = job.request.prefetch, seq.n
            return
        if source is not None and source.prefetch is not None:
            self._tiers.prefetcher.used(source.prefetch, share)
            source.prefetch, source.dirty = None, True
        if seq.prefetch is not None:  # taken over with nothing of what was prefetched
            seq.prefetch, seq.dirty = None, True

    def _came(self, job: Job, nbytes: int) -> None:
        """Rows of a job were restored or evaluated."""
        self._tiers.prefetcher.moved(tenant_of(job.request.scope), nbytes)
        if job.request.prefetch is not None:
            self._tiers.prefetcher.brought(job.request.prefetch, nbytes)

    def _put_back(self, job: Job, seq: LiveSeq) -> bool:
        """Make live what the job had before it was preempted, if that is more than `seq` has.
        Returns whether it was."""
        saved, job.saved = job.saved, None
        if saved is None or saved.n <= seq.n:
            return False
        saved.put_back(self._memory, self._pool, seq)
        self.bytes_in += 0 if saved.rows is None else saved.rows.nbytes
        return True

    def load(self, job: Job, on_loaded: Callable[[Job, Loaded | TowerdError], None]) -> None:
        """Compose what `begin` planned on a worker thread; `on_loaded` is called there, for one
        blob at a time, and last with `is_last` or an error."""
        plan = self._plans.pop(id(job))
        job.loads += 1
        load = job.loads

        def work() -> None:
            try:
                slot = threading.Semaphore(_BLOBS_AHEAD)
                state = None if self._checkpoints is None else self._checkpoints.load(plan)
                is_usable = self._checkpoints is None or state is not None
                places = self._places(job, plan.start + plan.n)
                n = 0
                for made in self._tiers.compose(plan, places) if is_usable else ():
                    slot.acquire()
                    rows = made.blob, made.provenance, made.n_hot, made.n_warm
                    on_loaded(job, Loaded(load, *rows, False, made, slot))
                    n += made.n
                on_loaded(job, Loaded(load) if state is None else _last(load, plan, state, n))
            except TowerdError as error:
                on_loaded(job, error)
            except Exception as error:
                log.exception("composing stored rows failed")
                message = f"Composing stored rows failed: {error}"
                public = "Composing stored rows failed; the daemon's log has it."
                failed = TowerdError(message, public=public)
                on_loaded(job, unforeseen(error, "") if isinstance(error, MemoryError) else failed)

        self._workers.submit(work)

    def _places(self, job: Job, n: int) -> Labels | None:
        """The places of the first `n` tokens of a job; None: each is at its index."""
        return Places(job.ids[:n]).between(0, n) if self._pool.has_places and job.media else None

    def move(self, job: Job, on_loaded: Callable[[Job, Loaded | TowerdError], None]) -> None:
        """Wait for the moved rows of the piece where `job` stands; `on_loaded` is called once."""
        assert job.moves is not None
        provenance, load = job.moves.provenance, job.loads + 1
        future = job.moves.pieces[0].rows
        assert future is not None
        job.loads = load

        def tell(future: Future[MovedRows | None]) -> None:
            rows = None if future.cancelled() else future.result()
            if rows is None:
                on_loaded(job, Loaded(load, is_piece=True))
            else:
                on_loaded(job, Loaded(load, None, provenance, is_piece=True, moved=rows))

        future.add_done_callback(tell)

    def attach(self, job: Job, loaded: Loaded) -> None:
        """Append loaded rows to the job's sequence. Raises TowerdError if llama.cpp refuses."""
        seq = job.seq
        assert seq is not None
        if loaded.is_piece:
            self._attach_piece(job, seq, loaded.moved)
            return
        try:
            if loaded.is_short:
                raise RowsMissing("stored rows turned out to be gone")
            if loaded.blob is not None:
                self.bytes_in += len(loaded.blob)
                self._came(job, len(loaded.blob))
                head = None if loaded.composed is None else loaded.composed.head
                self._restore(seq, loaded.blob, loaded.checkpoint, head)
            if loaded.n:
                self._pool.append(seq, job.ids[seq.n : seq.n + loaded.n], loaded.provenance)
                if loaded.composed is not None:
                    seq.decoded += tuple(loaded.composed.decoded)
            if loaded.checkpoint is not None and loaded.checkpoint.derived:
                # and so is whatever is computed from it
                seq.provenance[seq.n - 1] = max(seq.provenance[seq.n - 1], Provenance.DERIVED)
            seq.is_whole = seq.is_whole or loaded.is_last
        except RowsMissing as error:
            log.warning("a prompt begins again", extra={"reason": str(error)})
            job.n_broken += 1
            raise
        else:
            job.n_loaded_hot += loaded.n_hot
            job.n_loaded_warm += loaded.n_warm
            if loaded.is_last and not job.t_first and not loaded.n:
                # Rows that turned out damaged or gone are prefilled: report those that came.
                self._report(job, job.reuse.live, job.n_loaded_hot, job.n_loaded_warm, NOTHING)
        finally:
            self.discard(loaded)

    def _attach_piece(self, job: Job, seq: LiveSeq, rows: MovedRows | None) -> None:
        """Append the rows of the job's next piece, or have its run evaluated instead."""
        assert job.moves is not None
        piece = job.moves.pieces[0]
        if rows is None or not self._moved.accepts(job, seq, piece, rows):
            self._pool.truncate(seq, self._moved.refuse(job, self._workers))
            self._moved.report(job)
            return
        blob = rows.kept.blob
        assert blob is not None
        if (place := seq.place_next) != piece.p0:
            label_places(blob, piece.p0, np.arange(place, place + piece.n, dtype=np.int32))
        self.bytes_in += len(blob)
        self._restore(seq, blob, None, None)
        self._pool.append(seq, job.ids[piece.p0 : piece.p1], job.moves.provenance)
        self._moved.attached(job, rows, self._workers)

    def drop_unchecked(self, job: Job) -> None:
        """Before a job ends or waits, take moved rows out of its sequence that were not checked yet, and
        bring no more of them."""
        n_live = self._moved.drop_unchecked(job)
        if n_live is not None and job.seq is not None:
            self._pool.truncate(job.seq, n_live)

    def _restore(
        self,
        seq: LiveSeq,
        blob: Buffer,
        checkpoint: StateCheckpoint | None,
        head: HeadRows | None,
    ) -> None:
        """Put rows, with those of a head, or the state of a checkpoint behind what `seq` holds."""
        if checkpoint is None or self._checkpoints is None:
            self._memory.append(seq.id, blob, is_empty=seq.n == 0, head=head)
            return
        try:
            self._checkpoints.attach(seq, blob, checkpoint)
        except TowerdError as error:
            raise RowsMissing(f"a state checkpoint was refused: {error}") from error

    def drop_partial_medium(self, job: Job) -> None:
        """After a load, drop rows of an incomplete medium, which is evaluated as a whole. Raises
        RowsMissing if the memory cannot drop rows."""
        seq = job.seq
        assert seq is not None
        n = whole(job.media, seq.n)
        if n == seq.n:
            return
        if self._checkpoints is not None:
            job.n_broken += 1
            raise RowsMissing("stored rows end within a medium")
        self._pool.truncate(seq, n)

    def is_coming(self, job: Job, found: FoundLive, active: Iterable[Job]) -> bool:
        """Whether a running prompt will soon have a much longer prefix of this job live than was
        found, so that it is worth waiting for."""
        if not job.request.cache_prompt:
            return False
        evaluated = (
            other for other in active if other.phase in (JobPhase.LOADING, JobPhase.PREFILL)
        )

        def usable(other: Job, n: int) -> int:
            n = min(n, self._n_sharable(other, job))
            return n if other.n_live < n else 0

        coming = LiveIndex(evaluated).longest(job.ids, job.request.scope, usable=usable)
        return coming.n >= found.n_common + _SHARE_TOKENS_MIN

    def _n_sharable(self, other: Job, job: Job) -> int:
        """How many leading tokens of `other` its sequence can share with `job`: none that are moved,
        since they may be refused yet."""
        if other.request.live == job.request.live:
            return min(other.n, other.n_unmoved)
        n = self._hooks.of_job(job).n_taken(job, self._hooks.of_job(other).n_given(other))
        return min(n, other.n_unmoved)

    def discard(self, loaded: Loaded) -> None:
        """Release the buffer of rows that were attached or are no longer wanted."""
        if loaded.composed is not None:
            self._tiers.recycle(loaded.composed)
        if loaded.slot is not None:
            loaded.slot.release()

    def _report(self, job: Job, live: int, hot: int, warm: int, coming: RestorePlan) -> None:
        """Set the job's reuse; `coming`: what is to come beside the live rows."""
        assert job.seq is not None
        n_rest = job.n_prompt - live - hot - warm
        reuse = Reuse(live, hot, warm, n_rest, coming.n_approximate + job.seq.n_approximate())
        if reuse.approximate:
            reuse = replace(reuse, drift=self._moved.drift(job, job.seq, coming))
        job.reuse = reuse

    # ---- out ------------------------------------------------------------------------------

    def save(self, job: Job) -> None:
        """Copy what is live of a job that is to be preempted, if there is RAM for that."""
        assert job.seq is not None
        n_bytes = _COPIES * job.seq.n * self._tiers.layout.token_bytes
        job.saved = save(self._memory, job.seq) if self._tiers.ram.has_room(n_bytes) else None

    def drop(self, seq: LiveSeq) -> None:
        """Drop a sequence from the context, after its hook has saved what only it has."""
        try:
            self._hooks.of_seq(seq).leaving(seq)
        except Exception:
            log.exception("a chat with a budget is not kept in RAM; it will be evaluated again")
        self._pool.drop(seq)

    def protect(self, jobs: Iterable[Job]) -> None:
        """Keep the jobs' rows through the decode of their parts of the batch, in this order."""
        for job in jobs:
            assert job.seq is not None
            self._memory.protect(job.seq.id, job.seq.place_next, job.n_in_batch)

    def advanced(self, job: Job) -> None:
        """After the job's part of the batch was evaluated, take a state checkpoint if it stands at
        one of its positions for them."""
        self._hooks.of_job(job).after_step(job)
        self._came(job, job.n_in_batch * self._tiers.layout.token_bytes)
        if job.seq is not None:
            self._memory.protect(
                job.seq.id, job.seq.place_next, 0
            )  # from what others evaluate next
        if (
            job.seq is not None
            and job.seq.n in job.checkpoints_at
            and self._checkpoints is not None
        ):
            self._checkpoints.capture(job.seq)

    def left(self, job: Job) -> None:
        """Drop the sequence of a job that ends while it is being loaded, if the rows that came are
        useless without their state checkpoint."""
        if job.seq is not None and not job.seq.is_whole:
            self._pool.drop(job.seq)
            job.seq = None

    def released(self, seq: LiveSeq) -> None:
        """Its job is recorded: it may be exported, shared, evicted. Take a checkpoint at its
        end."""
        seq.busy = False
        seq.dirty = (
            seq.dirty or seq.prefetch is None
        )  # nobody has used it: it takes no room elsewhere
        if self._checkpoints is not None and seq.n:
            self._checkpoints.capture(seq)


def _prefetched(found: FoundLive) -> tuple[LiveSeq | None, float]:
    """The sequence that was found if it was prefetched, and which share of that was found; None if none
    was."""
    source = found.source
    if not isinstance(source, LiveSeq) or source.prefetch is None or found.n <= source.n_before:
        return None, 0.0
    return source, (found.n - source.n_before) / (source.n - source.n_before)


def _last(load: int, plan: RestorePlan, state: Buffer, n_rows: int) -> Loaded:
    """The end of a load of which `n_rows` tokens came with rows: the state of its checkpoint."""
    bare = np.full(plan.n - plan.n_rows, Provenance.EXACT, np.uint8)
    n_hot = len(bare) if plan.n_hot else 0
    return Loaded(
        load,
        state,
        bare,
        n_hot,
        len(bare) - n_hot,
        checkpoint=plan.checkpoint,
        is_short=n_rows + len(bare) < plan.n,
    )
