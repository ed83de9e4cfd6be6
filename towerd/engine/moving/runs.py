"""MovedRuns: finds known runs of tokens behind text that changed before them, and decides which rows stay.

A prompt that changed in the middle has, behind the change, runs of tokens whose rows are known: those
that were computed behind the old text, elsewhere in the prefix tree. What such rows remember of the old
text rarely matters to an answer, which reads the new text directly. Where it does, it shows: blocks of
the run that are evaluated again behind the kept rows deviate from the stored ones (V, by layer). The
limit that a deviation has to stay under was measured on this model.

llama.cpp evaluates a token only at the end of its sequence. So a run is kept in pieces, in order of
position, and its blocks are evaluated in between, like any other tokens of the prompt. How pieces come
behind evaluated tokens is the engine's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from towerd.drift import DecodedRun, Drift, combined
from towerd.engine.base import GenerateRequest
from towerd.engine.moving.moves import MovedPiece, MovedRows, Moves
from towerd.engine.moving.rotation import Rotation
from towerd.errors import StoreError, TowerdError
from towerd.slots.blob import emit_blob, parse_blob
from towerd.slots.errors import StateError
from towerd.slots.rows import KVRows, join
from towerd.store import Node
from towerd.store.tree.run_index import StoredRun
from towerd.tiers.manager import Tiers
from towerd.tiers.moved_limits import (
    BLOCK_TOKENS,
    STRETCH_TOKENS_MIN,
    MovedLimits,
    RunProfile,
    block_offsets,
    deviation,
)
from towerd.tiers.plan import NOTHING, RestorePlan
from towerd.tokens import Ids, Provenance, Provenances, count_unmoved

log = logging.getLogger(__name__)

RUN_TOKENS_MIN = BLOCK_TOKENS + STRETCH_TOKENS_MIN
"""Shorter runs are evaluated."""
_AHEAD = 2
"""Pieces that are composed at once."""


class MovedRuns:
    """Thread-safe but for the counters."""

    def __init__(
        self,
        tiers: Tiers,
        rotation: Rotation,
        *,
        piece_bytes_max: int | None = None,
        prepare: Callable[[KVRows], KVRows] = lambda rows: rows,
    ) -> None:
        """piece_bytes_max: longer pieces are brought in parts. prepare: puts the rows of a piece into
        the form that they are attached in, on a worker thread"""
        self.n_moved = self.n_checked = self.n_refused = 0
        """Tokens since the start: kept, evaluated again to check them, and found but evaluated. Counted by
        the engine."""
        self._tiers = tiers
        self._rotation = rotation
        self._piece_bytes_max = piece_bytes_max
        self._prepare = prepare

    @property
    def limits(self) -> MovedLimits | None:
        """What deviations have to stay under; None: no run is kept."""
        found = self._tiers.moved_limits
        return None if found is None or self._tiers.exact or self._rotation.why_not else found

    def tokens_min(self, request: GenerateRequest) -> int:
        """The shortest run that is kept for a request; 0: none is."""
        asked = request.reuse_tokens_min or 0
        if not asked or not request.takes_moved or not request.cache_prompt or self.limits is None:
            return 0
        return max(asked, RUN_TOKENS_MIN)

    def find(
        self,
        ids: Ids,
        scope: str,
        start: int,
        stop: int,
        tokens_min: int,
        *,
        place_of: Callable[[int], int] = lambda n: n,
    ) -> Moves | None:
        """What to keep of ids[start:stop] in runs of at least `tokens_min` tokens; None if there is
        nothing. place_of: llama.cpp's position of a token of the prompt that is not within a medium"""
        store = self._tiers.store
        with store.locked():
            runs = store.runs(ids, scope, start, stop, tokens_min, _can_move)
            pieces = [piece for run in runs for piece in self._pieces(run, place_of)]
        return Moves(pieces, {run.at: RunProfile(run.n) for run in runs}) if pieces else None

    def anywhere(
        self, ids: Ids, scope: str, start: int, stop: int, tokens_min: int
    ) -> list[StoredRun]:
        """The runs that are known, with or without rows."""
        return self._tiers.store.runs(ids, scope, start, stop, tokens_min, lambda _: True)

    def _pieces(self, run: StoredRun, place_of: Callable[[int], int]) -> list[MovedPiece]:
        """A run in pieces. Under the store's lock."""
        n_max = run.n
        if self._piece_bytes_max is not None:
            n_max = max(BLOCK_TOKENS, self._piece_bytes_max // self._rotation.layout.token_bytes)
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
                place = place_of(at + first)
                piece = MovedPiece(at, at + first, at + p0, at + p1, delta, place, tuple(parts))
                found.append(piece)
        return found

    def compose_ahead(self, moves: Moves, workers: Executor) -> None:
        """Have `workers` compose the next pieces."""
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
            moved = self._rotation.moved(rows, piece.block, piece.place)
            kept = self._prepare(moved.slice(piece.p0, piece.p1))
            block = moved.slice(piece.block, piece.p0).copy() if piece.block < piece.p0 else None
        except (TowerdError, StateError) as error:
            log.warning("a run of rows cannot be moved", extra={"error": str(error)})
            return None
        except Exception:
            log.exception("composing moved rows failed")
            return None
        return MovedRows(kept, block, n_hot == len(rows))

    def _native(self, parts: list[KVRows]) -> KVRows:
        """Consecutive rows in the context's own format. Raises StoreError if there are none."""
        layout = self._rotation.layout
        if not parts:
            raise StoreError("the rows of a run that was to be moved are gone")
        if all(part.layout == layout and not part.v_trans for part in parts):
            return join(parts)
        blob = emit_blob(parts, layout=layout)
        return parse_blob(blob, cell_ext=layout.cell_ext).rows

    # ---- while the prompt is evaluated --------------------------------------------------------

    def accepts(self, moves: Moves, rows: MovedRows, evaluated: KVRows | None) -> bool:
        """Whether the evaluated block before the next piece deviates little enough from the run's own
        rows of it. A piece without a block follows one that was accepted."""
        limits = self.limits
        if rows.block is None:
            return True
        if limits is None or evaluated is None:
            return False
        moves.n_checked += len(rows.block)
        profile = moves.profiles[moves.pieces[0].run]
        profile.deviations.append(deviation(evaluated, rows.block))
        is_allowed = self.allows(profile)
        if not is_allowed:  # the block is evaluated, and the run cut before it
            profile.deviations.pop()
        return is_allowed

    def allows(self, profile: RunProfile) -> bool:
        """Whether a run may be kept, as far as its blocks tell."""
        limits = self.limits
        return limits is not None and limits.allows(self._tiers.fidelity, profile)

    def drift(
        self,
        moves: Moves | None,
        live: Provenances,
        n_prompt: int,
        *,
        decoded: Sequence[DecodedRun] = (),
        coming: RestorePlan = NOTHING,
    ) -> Drift | None:
        """The `Reuse.drift` of live and stored rows, all approximations combined; None if there is
        none or one was not measured. live: the provenance of live rows; decoded: what those among
        them were decoded from that come from stored formats; coming: what is to come from the store"""
        limits = self.limits
        attached = [] if moves is None else moves.attached
        n_before = attached[0].p0 if attached else len(live)
        costs: list[Drift | None] = []
        is_decoded = np.equal(live, Provenance.APPROXIMATE)
        if coming.n_approximate > coming.n_moved or is_decoded.any():
            costs.append(self._tiers.drift_of(is_decoded, decoded, coming.decoded, n_prompt))
        if (
            coming.n_moved or count_unmoved(live) < n_before
        ):  # for an earlier request: what the limits allow
            costs.append(None if limits is None else limits.worst(self._tiers.fidelity))
        if attached and limits is not None and moves is not None:
            costs.append(limits.estimate(moves.measured, n_prompt))
        known = [cost for cost in costs if cost is not None]
        return combined(known) if costs and len(known) == len(costs) else None


def _can_move(node: Node) -> bool:
    """Whether a node's rows may be kept behind other text. Moved ones are not moved once more: what they
    deviate by would add up, and their blocks would only be compared with those of the last move."""
    found = (node.worst_hot, node.worst_file)
    return any(worst is not None and worst < Provenance.MOVED for worst in found)
