"""MovedJobs: brings known runs of tokens behind text that changed before them into live sequences.

What a run is, and which ones stay, is decided in `towerd.engine.moving.runs`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np

from towerd.drift import Drift
from towerd.engine.embedded.context.core import Core
from towerd.engine.embedded.context.places import Places
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.live.pool import LivePool, LiveSeq
from towerd.engine.moving.moves import MovedPiece, MovedRows, Moves
from towerd.engine.moving.rotation import Rotation
from towerd.engine.moving.runs import MovedRuns
from towerd.slots.blob import emit_blob, parse_rows
from towerd.slots.rows import KVRows
from towerd.store.tree.scope import public_of
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import NOTHING, RestorePlan
from towerd.tokens import Ids

log = logging.getLogger(__name__)

PIECE_BYTES_MAX = 32 << 20
"""Longer pieces are brought in parts, so that one is composed while the last is attached."""

PIECES_IN_ROOM = 32
"""Where RAM is limited, a piece takes at most one in so many parts of what is left beside the model: some are composed at
once, each by way of copies."""


class MovedJobs:
    """Plans, attaches and accounts for moved runs. For the inference thread."""

    def __init__(
        self,
        core: Core,
        pool: LivePool,
        tiers: Tiers,
        rotation: Rotation,
        export: Callable[[LiveSeq], None],
    ) -> None:
        """export: hands what the store lacks of a sequence to it"""
        piece_bytes = min(PIECE_BYTES_MAX, tiers.ram.room // PIECES_IN_ROOM)
        self.runs = MovedRuns(tiers, rotation, piece_bytes_max=piece_bytes, prepare=self._as_blob)
        self._ram = tiers.ram
        self._core = core
        self._pool = pool
        self._export = export

    def plan(self, job: Job, seq: LiveSeq, n_stored: int, workers: Executor) -> Moves | None:
        """What to keep behind the live tokens and `n_stored` tokens from the store; None if there is
        nothing. Composing begins at once, on `workers`."""
        request, tokens_min = job.request, self.runs.tokens_min(job.request)
        start, stop = seq.n + n_stored, job.n - 1  # the last token has to be evaluated
        if not tokens_min or job.truncated or stop - start < tokens_min or self._ram.is_pressed:
            return None
        asked = job.ids, request.scope, start, stop, tokens_min
        self._export_runs(*asked)
        places = Places(job.ids) if self._pool.has_places and job.media else Places()
        moves = self.runs.find(*asked, place_of=places.of)
        if moves is None:
            return None
        # Others may share public tokens only up to the first that prefill would not compute.
        seq.n_public = min(seq.n_public, moves.pieces[0].p0)
        self.runs.compose_ahead(moves, workers)
        return moves

    def _export_runs(self, ids: Ids, scope: str, start: int, stop: int, tokens_min: int) -> None:
        """Have the store take the rows of runs that only idle live sequences have: those of the chat's
        last turn, if its next one comes at once."""
        scopes = scope, public_of(scope)
        dirty = [s for s in self._pool if s.dirty and not s.busy and s.scope in scopes]
        if not dirty:
            return
        for run in self.runs.anywhere(ids, scope, start, stop, tokens_min):
            wanted = ids[run.at : run.end]
            for seq in dirty:
                there = seq.tokens()[run.start : run.start + run.n]
                if not seq.dirty or not np.array_equal(there, wanted):
                    continue
                try:
                    self._export(seq)
                except Exception:  # its rows stay live alone; this request is another one
                    log.exception("the rows of an idle sequence are not stored")

    def _as_blob(self, rows: KVRows) -> KVRows:
        """The same rows as views of the blob that the context takes."""
        layout = rows.layout
        blob = np.asarray(emit_blob([rows], v_trans=self._core.context.v_trans))
        has_window = layout.n_window > 0
        return parse_rows(blob, cell_ext=layout.cell_ext, has_window=has_window, layout=layout)

    # ---- while the job runs ------------------------------------------------------------------

    def accepts(self, job: Job, seq: LiveSeq, piece: MovedPiece, rows: MovedRows) -> bool:
        """Whether the evaluated block before a piece deviates little enough from the run's own rows
        of it."""
        moves, evaluated = job.moves, None
        assert moves is not None
        if piece.block < piece.p0:
            evaluated = self._core.memory.rows(seq.id, piece.block, piece.p0, seq.places)
        n_checked = moves.n_checked
        is_accepted = self.runs.accepts(moves, rows, evaluated)
        self.runs.n_checked += moves.n_checked - n_checked
        return is_accepted

    def refuse(self, job: Job, workers: Executor) -> int:
        """Cut the run of the next piece, whose block deviates or whose rows are gone. Returns how many of
        the job's tokens stay live: see `Moves.refuse`. Call `report` once they alone are live."""
        moves = job.moves
        assert moves is not None
        n_live, n_refused = moves.pieces[0].p0, moves.n_refused
        for piece in moves.refuse(self.runs.allows):
            n_live = piece.p0
            self._count(job, piece, -1)
        self.runs.n_refused += moves.n_refused - n_refused
        self.runs.compose_ahead(moves, workers)
        return n_live

    def drop_unchecked(self, job: Job) -> int | None:
        """Bring no more pieces, since the job ends or waits. Returns how many of its tokens may stay live;
        None: all."""
        n_live = None
        for piece in job.moves.drop_unchecked() if job.moves is not None else ():
            n_live = piece.p0
            self._count(job, piece, -1)
        return n_live

    def attached(self, job: Job, rows: MovedRows, workers: Executor) -> None:
        """Account for the next piece, whose rows are live now."""
        assert job.moves is not None
        self._count(job, job.moves.attach(rows), 1)
        self.report(job)
        self.runs.compose_ahead(job.moves, workers)

    def _count(self, job: Job, piece: MovedPiece, sign: int) -> None:
        n = sign * piece.n
        self.runs.n_moved += n
        hot, warm = (n, 0) if piece.is_hot else (0, n)
        job.n_loaded_hot += hot
        job.n_loaded_warm += warm
        if not job.t_first:
            job.reuse = job.reuse.with_moved(hot, warm)

    def report(self, job: Job) -> None:
        """Put what was checked, and the drift that is to be expected, into the job's reuse."""
        moves, seq = job.moves, job.seq
        if moves is None or seq is None or job.t_first:
            return
        job.reuse = replace(job.reuse, checked=moves.n_checked, refused=moves.n_refused)
        job.reuse = replace(job.reuse, drift=self.drift(job, seq))

    def drift(self, job: Job, seq: LiveSeq, coming: RestorePlan = NOTHING) -> Drift | None:
        """See `MovedRuns.drift`. coming: what is to come from the store"""
        live = seq.provenance[: seq.n]
        return self.runs.drift(job.moves, live, job.n_prompt, decoded=seq.decoded, coming=coming)
