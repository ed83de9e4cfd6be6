"""MovedRuns: keeps the rows of known runs of tokens behind text that changed before them, and checks them.

A prompt that changed in the middle has, behind the change, runs of tokens whose rows are known: those
that were computed behind the old text, elsewhere in the prefix tree. What such rows remember of the old
text rarely matters to an answer, which reads the new text directly. Where it does, it shows: blocks of
the run that are evaluated again behind the kept rows deviate from the stored ones (V, by layer). The
limit that a deviation has to stay under was measured on this model.

llama.cpp evaluates a token only at the end of its sequence. So a run is kept in pieces, in order of
position, and its blocks are evaluated in between, like any other tokens of the prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np

from towerd.drift import Drift, combined
from towerd.engine.embedded.context.core import Core
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.live.moves import MovedPiece, MovedRows, Moves
from towerd.engine.embedded.live.pool import LivePool, LiveSeq
from towerd.engine.embedded.restore.rotation import Rotation
from towerd.errors import StoreError, TowerdError
from towerd.slots.blob import emit_blob, parse_blob
from towerd.slots.errors import StateError
from towerd.slots.rows import KVRows, join
from towerd.store import Node
from towerd.store.tree.run_index import StoredRun
from towerd.store.tree.scope import public_of
from towerd.tiers.manager import Tiers
from towerd.tiers.moved_limits import (
    BLOCK_TOKENS,
    STRETCH_TOKENS_MIN,
    MovedLimits,
    RunProfile,
    block_offsets,
    deviation,
)
from towerd.tiers.plan import RestorePlan
from towerd.tokens import Ids, Provenance

log = logging.getLogger(__name__)

PIECE_BYTES_MAX = 32 << 20
"""Longer pieces are brought in parts, so that one is composed while the last is attached."""
_AHEAD = 2
"""Pieces that are composed at once."""


class MovedRuns:
    """Plans, composes, checks and accounts for moved runs. All but composing is for the inference
    thread."""

    def __init__(
        self,
        core: Core,
        pool: LivePool,
        tiers: Tiers,
        rotation: Rotation,
        export: Callable[[LiveSeq], None],
    ) -> None:
        """export: hands what the store lacks of a sequence to it"""
        self.n_moved = self.n_checked = self.n_refused = 0
        """Tokens since the start: kept, evaluated again to check them, and found but evaluated."""
        self._core = core
        self._pool = pool
        self._tiers = tiers
        self._rotation = rotation
        self._export = export

    @property
    def limits(self) -> MovedLimits | None:
        """What deviations have to stay under; None: no run is kept."""
        found = self._tiers.moved_limits
        return None if found is None or self._tiers.exact or self._rotation.why_not else found

    def plan(self, job: Job, seq: LiveSeq, n_stored: int, workers: Executor) -> Moves | None:
        """What to keep behind the live tokens and `n_stored` tokens from the store; None if there is
        nothing. Composing begins at once, on `workers`."""
        request, limits = job.request, self.limits
        start, stop = seq.n + n_stored, job.n - 1  # the last token has to be evaluated
        tokens_min = request.reuse_tokens_min or 0
        if limits is None or not tokens_min or job.truncated:
            return None
        if not request.takes_moved or not request.cache_prompt:
            return None
        tokens_min = max(tokens_min, BLOCK_TOKENS + STRETCH_TOKENS_MIN)
        if stop - start < tokens_min:
            return None
        asked = job.ids, request.scope, start, stop, tokens_min
        self._export_runs(*asked)
        with self._tiers.store.locked():
            runs = self._tiers.store.runs(*asked, _can_move)
            pieces = [piece for run in runs for piece in self._pieces(run)]
        if not pieces:
            return None
        # Others may share public tokens only up to the first that prefill would not compute.
        seq.n_public = min(seq.n_public, pieces[0].p0)
        moves = Moves(pieces, {run.at: RunProfile(run.n) for run in runs})
        self._compose_ahead(moves, workers)
        return moves

    def _export_runs(self, ids: Ids, scope: str, start: int, stop: int, tokens_min: int) -> None:
        """Have the store take the rows of runs that only idle live sequences have: those of the chat's
        last turn, if its next one comes at once."""
        scopes = scope, public_of(scope)
        dirty = [s for s in self._pool if s.dirty and not s.busy and s.scope in scopes]
        if not dirty:
            return
        for run in self._tiers.store.runs(ids, scope, start, stop, tokens_min, lambda _: True):
            wanted = ids[run.at : run.end]
            for seq in dirty:
                there = seq.tokens()[run.start : run.start + run.n]
                if not seq.dirty or not np.array_equal(there, wanted):
                    continue
                try:
                    self._export(seq)
                except Exception:  # its rows stay live alone; this request is another one
                    log.exception("the rows of an idle sequence are not stored")

    def _pieces(self, run: StoredRun) -> list[MovedPiece]:
        """A run in pieces. Under the store's lock."""
        n_max = max(BLOCK_TOKENS, PIECE_BYTES_MAX // self._core.layout.token_bytes)
        offsets = block_offsets(run.n)
        delta = run.at - run.start
        found: list[MovedPiece] = []
        for block, end in zip(offsets, [*offsets[1:], run.n], strict=True):
            starts = range(block + BLOCK_TOKENS, end, n_max)
            for i, p0 in enumerate(starts):
                p1, first = min(p0 + n_max, end), block if i == 0 else p0
                at = run.start
                worst = Provenance.APPROXIMATE
                parts = self._tiers.store.plan_rows(run.node, at + first, at + p1, worst=worst)
                if sum(part.p1 - part.p0 for part in parts) != p1 - first:
                    return found
                at = run.at
                piece = MovedPiece(at, at + first, at + p0, at + p1, delta, tuple(parts))
                found.append(piece)
        return found

    def _compose_ahead(self, moves: Moves, workers: Executor) -> None:
        for piece in moves.pieces[:_AHEAD]:
            if piece.rows is None:
                piece.rows = workers.submit(self._compose, piece)

    def _compose(self, piece: MovedPiece) -> MovedRows | None:
        """The rows of a piece, on a worker thread; None (and a warning) if they cannot be read."""
        try:
            n_hot = sum(part.p1 - part.p0 for part in piece.parts if part.tier == "hot")
            plan = RestorePlan(piece.block - piece.delta, piece.parts, n_hot)
            rows = self._native([rows for _, rows in self._tiers.rows(plan)])
            if len(rows) != piece.p1 - piece.block:
                raise StoreError("the rows of a run that was to be moved are gone")
            moved = self._rotation.moved(rows, piece.block)
            kept = moved.slice(piece.p0, piece.p1)
            block = moved.slice(piece.block, piece.p0).copy() if piece.block < piece.p0 else None
            blob = emit_blob([kept], v_trans=self._core.context.v_trans)
        except (TowerdError, StateError) as error:
            log.warning("a run of rows cannot be moved", extra={"error": str(error)})
            return None
        except Exception:
            log.exception("composing moved rows failed")
            return None
        return MovedRows(np.asarray(blob), block, n_hot == len(rows))

    def _native(self, parts: list[KVRows]) -> KVRows:
        """Consecutive rows in the context's own format. Raises StoreError if there are none."""
        layout = self._core.layout
        if not parts:
            raise StoreError("the rows of a run that was to be moved are gone")
        if all(part.layout == layout and not part.v_trans for part in parts):
            return join(parts)
        blob = emit_blob(parts, layout=layout)
        return parse_blob(blob, cell_ext=layout.cell_ext).rows

    # ---- while the job runs ------------------------------------------------------------------

    def accepts(self, job: Job, seq: LiveSeq, piece: MovedPiece, rows: MovedRows) -> bool:
        """Whether the evaluated block before a piece deviates little enough from the run's own rows
        of it. A piece without a block follows one that was accepted."""
        limits, moves = self.limits, job.moves
        assert moves is not None
        if rows.block is None:
            return True
        evaluated = self._core.memory.rows(seq.id, piece.block, piece.p0)
        if limits is None or evaluated is None:
            return False
        n = piece.p0 - piece.block
        moves.n_checked += n
        self.n_checked += n
        profile = moves.profiles[piece.run]
        profile.deviations.append(deviation(evaluated, rows.block))
        return limits.allows(self._tiers.fidelity, profile)

    def refuse(self, job: Job, workers: Executor, *, has_deviated: bool) -> int:
        """Cut the run of the next piece, whose block deviates (`has_deviated`) or whose rows are gone.
        Returns how many of the job's tokens stay live: what was kept between this block and the one
        before it is evaluated as well. Call `report` once they alone are live."""
        moves = job.moves
        assert moves is not None
        piece = moves.pieces[0]
        if has_deviated:  # the block that is evaluated once more
            moves.profiles[piece.run].deviations.pop()
        n_live, n = piece.p0, sum(each.n for each in moves.cut(piece.run))
        while moves.attached and moves.attached[-1].run == piece.run:
            last = moves.attached.pop()
            n_live, n = last.p0, n + last.n
            self._count(job, last, -1)
            if last.block < last.p0:
                break
        if not any(each.run == piece.run for each in moves.attached):
            del moves.profiles[piece.run]
        moves.n_refused += n
        self.n_refused += n
        self._compose_ahead(moves, workers)
        return n_live

    def attached(self, job: Job, rows: MovedRows, workers: Executor) -> None:
        """Account for the next piece, whose rows are live now."""
        moves = job.moves
        assert moves is not None
        piece = moves.pieces.pop(0)
        piece.is_hot = rows.is_hot
        moves.attached.append(piece)
        self._count(job, piece, 1)
        self.report(job)
        self._compose_ahead(moves, workers)

    def _count(self, job: Job, piece: MovedPiece, sign: int) -> None:
        n = sign * piece.n
        self.n_moved += n
        hot, warm = (n, 0) if piece.is_hot else (0, n)
        job.n_loaded_hot += hot
        job.n_loaded_warm += warm
        if not job.t_first:
            reuse = job.reuse
            job.reuse = replace(
                reuse,
                hot=reuse.hot + hot,
                warm=reuse.warm + warm,
                prefill=reuse.prefill - n,
                approximate=reuse.approximate + n,
                moved=reuse.moved + n,
            )

    def report(self, job: Job) -> None:
        """Put what was checked, and the drift that is to be expected, into the job's reuse."""
        moves, seq = job.moves, job.seq
        if moves is None or seq is None or job.t_first:
            return
        job.reuse = replace(job.reuse, checked=moves.n_checked, refused=moves.n_refused)
        job.reuse = replace(job.reuse, drift=self.drift(job, seq))

    def drift(self, job: Job, seq: LiveSeq, n_quantized: int = 0, n_moved: int = 0) -> Drift | None:
        """The `Reuse.drift` of live and stored rows, all approximations combined; None if there is
        none or one was not measured. n_quantized, n_moved: tokens that are to come from the store"""
        limits, moves = self.limits, job.moves
        attached = [] if moves is None else moves.attached
        n_before = attached[0].p0 if attached else seq.n
        quantized = np.equal(seq.provenance[: seq.n], Provenance.APPROXIMATE)
        costs: list[Drift | None] = []
        if n_quantized or quantized.any():
            costs.append(self._tiers.drift)
        if n_moved or seq.n_unmoved() < n_before:  # for an earlier request: what the limits allow
            costs.append(None if limits is None else limits.worst(self._tiers.fidelity))
        if attached and limits is not None and moves is not None:
            costs.append(limits.estimate(moves.measured, job.n_prompt))
        known = [cost for cost in costs if cost is not None]
        return combined(known) if costs and len(known) == len(costs) else None


def _can_move(node: Node) -> bool:
    """Whether a node's rows may be kept behind other text. Moved ones are not moved once more: what they
    deviate by would add up, and their blocks would only be compared with those of the last move."""
    found = (node.worst_hot, node.worst_file)
    return any(worst is not None and worst < Provenance.MOVED for worst in found)
