"""Splicer: uses a module's stored rows at another position than they were computed at.

llama.cpp evaluates a token only at the end of its sequence, and a token's rows depend on nothing
that comes after it. A module is therefore processed from its first token to its last: runs of rows
that are kept are moved to their new positions and appended, and the tokens between them are
evaluated like a prompt. Such a token sees what it would see if all were evaluated at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np

from towerd.drift import Drift, combined
from towerd.engine.base import Reuse
from towerd.engine.embedded.context.context import Buffer
from towerd.engine.embedded.context.core import Core
from towerd.engine.embedded.live.job import Blobs, Job, Splice, SplicePiece
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.errors import NotSupported, TowerdError
from towerd.model.llama_model import LlamaModel
from towerd.model.rope import Running, read_rope
from towerd.slots.blob import emit_blob
from towerd.slots.errors import StateError
from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows
from towerd.slots.shift import check_rope, shift
from towerd.store.tree.module import Spans
from towerd.tiers.manager import Tiers
from towerd.tiers.module_text import TOKENS_MIN
from towerd.tiers.modules import Modules, PlacedModule
from towerd.tokens import are_moved

log = logging.getLogger(__name__)


class Splicer:
    """Plans and composes splices. `plan`, `attached` and `drift` are for the inference thread."""

    def __init__(self, core: Core, tiers: Tiers) -> None:
        self.modules = Modules(tiers)
        self.n_spliced = 0
        """Tokens spliced in so far."""
        self._core = core
        self._tiers = tiers
        self._rope: Rope | None = None
        self._why_not = core.why_not_spliceable

    @property
    def fidelity(self) -> str:
        """The fidelity in force."""
        return self._tiers.fidelity

    def check(self) -> Rope:
        """The model's RoPE. Raises NotSupported, with the reason, if nothing can be spliced."""
        if self._tiers.exact:
            raise NotSupported(
                "A module is spliced in approximately, and this daemon runs with --fidelity exact."
            )
        return self.rope()

    @property
    def can_rotate(self) -> bool:
        """Whether the model's rows can be moved to other positions."""
        try:
            self.rope()
        except NotSupported:
            return False
        return True

    def rope(self) -> Rope:
        """The model's RoPE. Raises NotSupported, with the reason, if its rows cannot be moved."""
        if self._rope is None and not self._why_not:
            core = self._core
            try:
                rope = rope_of(core.model, core.info.row_identity.rope, core.context.n_cells)
                check_rope(core.layout, rope)
                self._rope = rope
            except StateError as error:  # for good: the file is not read again at every token
                self._why_not = str(error)
        if self._rope is None:
            raise NotSupported(f"This model's rows cannot be spliced: {self._why_not}.")
        return self._rope

    def plan(self, job: Job, seq: LiveSeq, n_stored: int, workers: Executor) -> Splice | None:
        """Plan what to splice in after the live tokens and `n_stored` tokens from the store; None
        if there is nothing. Composing begins at once, on `workers`. Prompts to be precached get
        exact rows only."""
        request = job.request
        if not request.cache_prompt or request.precache is not None:
            return None
        if self._core.why_not_spliceable:
            return None
        start, stop = seq.n + n_stored, job.n - 1  # the last token has to be evaluated
        splice, spliced = Splice(), seq.moved()
        for placed in self.modules.find(job.ids, request.scope):
            runs = kept_runs(placed, start, stop)
            if spliced[placed.at : placed.end].any():
                splice.counted.add(placed.at)
            if sum(p1 - p0 for p0, p1 in runs) >= TOKENS_MIN // 2:
                future = workers.submit(self._compose, placed, runs, request.scope)
                splice.pieces += [SplicePiece(placed, p0, p1, future) for p0, p1 in runs]
        if not splice.pieces:
            return None
        # Others may share public tokens only up to the first that prefill would not compute.
        seq.n_public = min(seq.n_public, splice.pieces[0].p0)
        return splice

    def attached(self, job: Job, piece: SplicePiece) -> None:
        """Account for `piece`, the next one, whose rows are live now."""
        assert job.splice is not None
        job.splice.pieces.remove(piece)
        self.n_spliced += piece.n
        blobs = piece.blobs.result()
        hot = piece.n if blobs is not None and blobs.is_hot else 0
        job.n_loaded_hot += hot
        job.n_loaded_warm += piece.n - hot
        if job.t_first:
            return
        drift = job.reuse.drift
        if piece.placed.at not in job.splice.counted:
            own = piece.placed.module.drift
            if not job.reuse.approximate:
                drift = own
            elif drift is not None:
                drift = combined((drift, own))
        job.splice.counted.add(piece.placed.at)
        reuse = job.reuse
        job.reuse = replace(
            reuse,
            hot=reuse.hot + hot,
            warm=reuse.warm + piece.n - hot,
            prefill=reuse.prefill - piece.n,
            approximate=reuse.approximate + piece.n,
            drift=drift,
        )

    def drift(self, job: Job, seq: LiveSeq, reuse: Reuse) -> Drift | None:
        """The `Reuse.drift` of live and stored rows, all approximations combined; None if there is
        none or one was not measured."""
        spliced = seq.moved()
        n_spliced = int(np.count_nonzero(spliced))
        costs: list[Drift | None] = []
        moved = are_moved(seq.provenance[: seq.n])
        if reuse.approximate > np.count_nonzero(moved):
            costs.append(self._tiers.drift)
        if moved.any() and not spliced[moved.argmax()]:  # what comes first was stored as moved
            costs.append(None)
        for placed in self.modules.find(seq.tokens(), job.request.scope) if n_spliced else ():
            if spliced[placed.at : placed.end].any():
                costs.append(placed.module.drift)
                spliced[placed.at : placed.end] = False
        if spliced.any():  # by a module that is gone, or that ends within the live tokens
            costs.append(None)
        known = [cost for cost in costs if cost is not None]
        return combined(known) if costs and len(known) == len(costs) else None

    def _compose(
        self, placed: PlacedModule, runs: list[tuple[int, int]], scope: str
    ) -> Blobs | None:
        """Compose the blobs of a module's runs, on a worker thread; None (and a warning) if one of
        them cannot be read."""
        try:
            rope = self.check()
            rows, n_hot = self.modules.rows(placed, scope)
            first = placed.module.first - placed.at
            blobs = {
                p0: self._blob(rows.slice(p0 + first, p1 + first), p0, rope) for p0, p1 in runs
            }
        except (TowerdError, StateError) as error:
            log.warning("a module cannot be spliced", extra={"error": str(error)})
            return None
        except Exception:
            log.exception("composing a module failed")
            return None
        return Blobs(blobs, n_hot == placed.n)

    def _blob(self, rows: KVRows, to: int, rope: Rope) -> Buffer:
        moved = shift(rows, to, rope, rot_k=self._core.info.row_identity.rot_k)
        return np.asarray(emit_blob([moved], v_trans=self._core.context.v_trans))


def kept_runs(placed: PlacedModule, start: int, stop: int) -> list[tuple[int, int]]:
    """The runs [p0, p1) of a placed module whose rows are kept, within [start, stop)."""
    runs = []
    for p0, p1 in complement(placed.module.spans, placed.n):
        p0, p1 = max(start, placed.at + p0), min(stop, placed.at + p1)
        if p0 < p1:
            runs.append((p0, p1))
    return runs


def complement(spans: Spans, n: int) -> list[tuple[int, int]]:
    """The parts of [0, n) that are not in `spans`."""
    ends = [0, *(stop for _, stop in spans)]
    starts = [*(start for start, _ in spans), n]
    return [(p0, p1) for p0, p1 in zip(ends, starts, strict=True) if p0 < p1]


_KNOWN = ("override.freq_base", "override.freq_scale")
"""The overrides that `towerd.model.rope` knows."""


def rope_of(model: LlamaModel, in_force: Mapping[str, float | str], n_cells: int) -> Rope:
    """The rotation of every layer as a unified context of `n_cells` has it; `in_force`: what
    `LlamaModel.rope` says. Raises StateError."""
    if others := sorted(
        name for name in in_force if name.startswith("override.") and name not in _KNOWN
    ):
        raise StateError(f"flags change how this model computes its rows ({', '.join(others)})")
    running = Running(
        rope_type=int(in_force["type"]),
        n_ctx_seq=n_cells,
        n_swa=model.n_swa,
        freq_base=float(in_force.get("override.freq_base", 0.0)),
        freq_scale=float(in_force.get("override.freq_scale", 0.0)),
    )
    return read_rope(model.path, running)
