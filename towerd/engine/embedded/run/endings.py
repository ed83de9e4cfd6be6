"""Endings: how jobs leave the inference thread, and the events that their clients get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from towerd.engine.base import StopType
from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.live.pool import LivePool
from towerd.engine.embedded.restore.restorer import Restorer
from towerd.engine.embedded.run.cell_room import CellRoom
from towerd.errors import TowerdError

Events = list[tuple[Job, Any]]


class Endings:
    """Removes jobs from the list `active`. Called by the inference thread only."""

    def __init__(
        self,
        pool: LivePool,
        restorer: Restorer,
        room: CellRoom,
        active: list[Job],
        left: Callable[[Job], None],
        deliver: Callable[[Events], None],
    ) -> None:
        """left: told of each job that has ended. deliver: hands events to their clients"""
        self._pool = pool
        self._restorer = restorer
        self._room = room
        self._active = active
        self._left = left
        self._deliver = deliver
        self._events: Events = []

    def emit(self, job: Job, event: Any) -> None:
        """Deliver `event` to the job's client at the end of this pass."""
        self._events.append((job, event))

    def emit_progress(self, job: Job) -> None:
        """Emit the progress of the job's prompt if its client asked for it."""
        if job.request.return_progress:
            self.emit(job, job.progress())

    def flush(self) -> None:
        """Deliver the emitted events."""
        if self._events:
            self._deliver(self._events)
            self._events = []

    def finish(self, job: Job, stop: StopType) -> None:
        """Emit Finish; the job's sequence stays busy until `release`."""
        n_kept, word = len(job.reply), ""
        if job.output is not None:
            if stop == "limit" and not job.output.stop:
                job.output.limit(False)
            n_kept = job.output.n_kept
            word = job.output.stopping_word.decode("utf-8", "replace")
        self._leave(job)
        finish = job.finish(stop, word, n_kept)
        if finish.truncated and job.output is not None:
            job.output.truncate()
        self.emit(job, finish)

    def fail(self, job: Job, error: TowerdError) -> None:
        """Emit the error; nothing is kept of the job's sequence, but what was generated is told."""
        if job.reply:
            n_kept = len(job.reply) if job.output is None else job.output.n_kept
            finish = job.finish("cancelled", "", n_kept)
            job.cut_off = replace(finish, n_cached=len(job.request.ids), n_rows=0)
        self._leave(job)
        job.saved = None
        if job.seq is not None:
            self._room.export_recorded(job.seq)
            self._pool.drop(job.seq)
            job.seq = None
        self.emit(job, error)

    def release(self, job: Job) -> None:
        """Free what a job held that is recorded or given up."""
        job.path.release()
        saved, job.saved = job.saved, None
        if saved is not None:
            self._room.export_saved(saved)
        seq, job.seq = job.seq, None
        if seq is None:
            return
        self._restorer.released(seq)
        if seq.n == 0:
            self._pool.drop(seq)

    def _leave(self, job: Job) -> None:
        self._restorer.drop_unchecked(job)
        if job.seq is not None and not job.seq.is_whole:
            self._room.export_recorded(job.seq)
        self._restorer.left(job)
        job.phase = JobPhase.DONE
        if job in self._active:
            self._active.remove(job)
        self._left(job)
