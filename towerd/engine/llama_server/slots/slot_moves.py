"""SlotMover: brings known runs of tokens behind text that changed before them into slots.

llama-server evaluates a token only at the end of what a slot holds, and a restore replaces the whole
slot. So a run comes in steps: the prompt is evaluated up to the end of a block and the slot saved; the
block's rows are compared with those of the run; the slot is restored with the run's next piece behind
it. Each step writes and reads the whole slot, so a run is kept only where that is quicker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from towerd.engine.base import Reuse
from towerd.engine.llama_server.process.upstream_adapters import UpstreamAdapters
from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.engine.llama_server.slots.placement import Costs, SlotRequest, unless_left
from towerd.engine.llama_server.slots.slot import Slot
from towerd.engine.llama_server.slots.slot_counters import SlotCounters
from towerd.engine.llama_server.slots.slot_rows import SlotRows
from towerd.engine.llama_server.slots.slot_table import SlotTable
from towerd.engine.moving.moves import MovedPiece, MovedRows, Moves
from towerd.engine.moving.runs import MovedRuns
from towerd.errors import TowerdError
from towerd.slots.image import SlotImage
from towerd.store.tree.scope import adapters_of, public_of
from towerd.tokens import Ids, Provenances, computed_after


@dataclass(frozen=True, slots=True)
class Moved:
    """What was kept behind the known beginning of a prompt."""

    moves: Moves
    n_evaluated: int
    """Tokens that were evaluated on the way."""
    ms: float
    """How long all of it took."""

    def counted_in(self, reuse: Reuse) -> Reuse:
        """The reuse of a prompt of which the rest would have been evaluated."""
        for piece in self.moves.attached:
            hot, warm = (piece.n, 0) if piece.is_hot else (0, piece.n)
            reuse = reuse.with_moved(hot, warm)
        return replace(reuse, checked=self.moves.n_checked, refused=self.moves.n_refused)


class SlotMover:
    """The slots of one llama-server. On the event loop."""

    def __init__(
        self,
        rows: SlotRows,
        runs: MovedRuns,
        table: SlotTable,
        counters: SlotCounters,
        upstream: UpstreamClient,
        adapters: UpstreamAdapters,
        workers: ThreadPoolExecutor,
        capture: Callable[[Slot], Coroutine[Any, Any, None]],
        erase: Callable[[Slot], Coroutine[Any, Any, None]],
    ) -> None:
        """capture, erase: save and empty a slot that is marked busy"""
        self._rows = rows
        self._runs = runs
        self._table = table
        self._counters = counters
        self._upstream = upstream
        self._adapters = adapters
        self._workers = workers
        self._capture = capture
        self._erase = erase

    @property
    def _costs(self) -> Costs:
        return self._table.policy.costs

    def is_wanted(self, request: SlotRequest, n: int) -> bool:
        """Whether runs are to be looked for behind the first `n` tokens of a prompt."""
        n_min = request.run_tokens_min
        return n_min > 0 and request.n - 1 - n >= n_min  # the last token has to be evaluated

    async def move(self, request: SlotRequest, slot: Slot, n: int) -> Moved | None:
        """Keep what is known of the prompt behind its first `n` tokens, which the slot holds; None if
        there is nothing, or its client left. The slot's record says what it holds afterwards, and that
        it is unknown if this raises (as UpstreamClient does, or TowerdError) and the slot was changed."""
        if not self.is_wanted(request, n) or not slot.known:
            return None
        await self._capture_runs(request, slot, n)
        moves = await self._on_worker(self._find, request, n)
        if moves is None or request.left.is_set():
            return None
        assert request.ids is not None
        began, n_stored = time.perf_counter(), min(slot.n_stored, n)
        live = slot.provenance_of(n)
        slot.hold_unknown(request.scope)
        slot.adapters = adapters_of(request.scope)
        try:
            self._runs.compose_ahead(moves, self._workers)
            while moves.pieces and not request.left.is_set():
                if not await self._evaluate(request, slot, moves.pieces[0].p0):
                    await self._erase(slot)
                    return None
                live = await self._step(request.ids, slot, moves, live)
            live = await self._checked(request, slot, moves, live)
        finally:
            moves.abandon()
        slot.hold_restored(request.ids[: len(live)], request.scope, 0, live, slot.decoded)
        slot.n_stored = n_stored
        n_moved = sum(piece.n for piece in moves.attached)
        self._runs.n_moved += n_moved
        self._runs.n_checked += moves.n_checked
        self._runs.n_refused += moves.n_refused
        ms = (time.perf_counter() - began) * 1e3
        return Moved(moves, len(live) - n - n_moved, ms)

    # ---- before -----------------------------------------------------------------------------

    async def _capture_runs(self, request: SlotRequest, slot: Slot, n: int) -> None:
        """Have the store take the rows of runs that only other idle slots have."""
        assert request.ids is not None
        scopes = request.scope, public_of(request.scope)

        def dirty() -> list[Slot]:
            idle = (s for s in self._table.slots if s is not slot and not s.busy)
            return [s for s in idle if s.known and s.sure and s.n_unsaved and s.scope in scopes]

        if not dirty():
            return
        asked = request.ids, request.scope, n, request.n - 1, request.run_tokens_min
        for run in await self._on_worker(self._runs.anywhere, *asked):
            wanted = request.ids[run.at : run.end]
            for other in dirty():
                if np.array_equal(other.tokens[run.start : run.start + run.n], wanted):
                    other.busy, other.holder, other.saving = True, "", True
                    try:
                        await self._capture(other)
                    finally:
                        self._table.free(other, used=False)

    def _find(self, request: SlotRequest, n: int) -> Moves | None:
        """What is worth its steps of the runs behind the first `n` tokens."""
        assert request.ids is not None
        ids, n_min = request.ids, request.run_tokens_min
        moves = self._runs.find(ids, request.scope, n, request.n - 1, n_min)
        if moves is None:
            return None
        for run in list(moves.profiles):
            pieces = [piece for piece in moves.pieces if piece.run == run]
            if not _is_worth(pieces, self._costs):
                moves.cut(run)
                del moves.profiles[run]
        return moves if moves.pieces else None

    # ---- a step -----------------------------------------------------------------------------

    async def _evaluate(self, request: SlotRequest, slot: Slot, n: int) -> bool:
        """Bring the slot to hold the first `n` tokens of the prompt; False if its client left
        meanwhile, so that llama-server may have stopped anywhere."""
        assert request.ids is not None
        lora = self._adapters.entries(request.scope)
        asked = self._upstream.evaluate(request.ids[:n], slot.id, lora)
        return await unless_left(request, asked) is not None

    async def _checked(
        self, request: SlotRequest, slot: Slot, moves: Moves, live: Provenances
    ) -> Provenances:
        """If pieces of a run are still to come, have the slot hold nothing behind the last block of it
        that was compared. live: see `_step`."""
        dropped = moves.drop_unchecked()
        if not dropped:
            return live
        assert request.ids is not None
        live = live[: dropped[-1].p0]
        lora = self._adapters.entries(request.scope)
        # It evaluates the last token again, and drops what follows.
        await self._upstream.evaluate(request.ids[: len(live)], slot.id, lora)
        return live

    async def _step(self, ids: Ids, slot: Slot, moves: Moves, live: Provenances) -> Provenances:
        """Keep the next piece, up to which the slot was evaluated, or refuse its run. live: the
        provenance of what the slot held of the prompt before; returns that of what it holds then."""
        piece = moves.pieces[0]
        image, saved = await self._rows.save(slot.id)
        if not np.array_equal(image.tokens, ids[: piece.p0]):
            raise TowerdError("A slot holds other tokens than it was given.")
        self._counters.saved(saved)
        self._costs.observe_save(image.n, saved.ms)
        evaluated = np.full(piece.p0 - len(live), computed_after(live), np.uint8)
        live = np.concatenate([live, evaluated])
        assert piece.rows is not None
        found = await asyncio.wrap_future(piece.rows)
        is_kept = await self._on_worker(self._accepts, moves, found, image)
        if found is not None and is_kept:
            live = np.concatenate([live, moves.provenance])
            moves.attach(found)
            parts = [image.full_rows, found.kept]
        else:
            dropped = moves.refuse(self._runs.allows)
            if dropped:
                live = live[: dropped[-1].p0]
            parts = [image.full_rows.slice(0, len(live))]
        self._runs.compose_ahead(moves, self._workers)
        if len(live) != piece.p0:
            restored = await self._rows.put(slot.id, ids[: len(live)], parts)
            self._counters.restored(restored)
            self._costs.observe_restore(restored.n, restored.ms)
        return live

    def _accepts(self, moves: Moves, found: MovedRows | None, image: SlotImage) -> bool:
        """Whether the next piece may stay, on a worker thread; `image`: the slot up to it."""
        if found is None:
            return False
        piece = moves.pieces[0]
        block = image.full_rows.slice(piece.block, piece.p0) if piece.block < piece.p0 else None
        return self._runs.accepts(moves, found, block)

    async def _on_worker(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *args)


def _is_worth(pieces: list[MovedPiece], costs: Costs) -> bool:
    """Whether evaluating these tokens costs more than the steps that bring their rows."""
    steps = sum(costs.save(piece.p0) + costs.restore(piece.p1) for piece in pieces)
    return costs.prefill(sum(piece.n for piece in pieces)) > steps
