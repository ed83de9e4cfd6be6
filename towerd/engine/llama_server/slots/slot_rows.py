"""SlotRows: moves rows between the slots of a llama-server and the store, through slot files.

llama-server can only save a whole slot, and a restore replaces the whole slot, so a file always starts
at token 0. The file of a save is in RAM for a moment; only the delta reaches the hot tier and the
disk. llama-server reads and writes files on its one main thread, between two decode steps: other slots
wait for that and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from towerd.drift import DecodedRun
from towerd.engine.llama_server.process.backend import LlamaServerBackend
from towerd.engine.llama_server.process.upstream_client import SlotAction
from towerd.engine.llama_server.slots.slot import Slot
from towerd.errors import InvalidRequest, SessionDeleted, StoreError, TowerdError
from towerd.slots.errors import StateError
from towerd.slots.image import (
    ImageSpec,
    SlotImage,
    image_size,
    parse_image,
    parse_state_image,
    usable,
    window_rows,
    write_image,
)
from towerd.slots.kind import WHOLE
from towerd.slots.rows import KVRows
from towerd.slots.slot_states import Bytes, state_part
from towerd.tiers.checkpoint_tier import CheckpointTier
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import RestorePlan
from towerd.tokens import Ids, Provenance, Provenances, are_exact, are_storable

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Restored:
    """What a slot holds after a restore: the first `n` tokens, `n_hot` of them from the hot tier."""

    n: int
    n_hot: int
    window_from: int
    provenance: Provenances
    ms: float
    """Composing and restoring together."""
    decoded: Sequence[DecodedRun] = ()
    """What rows in stored formats were decoded from."""
    n_bytes: int = 0
    blocked_ms: float = 0.0
    """How long llama-server's read took, in which no other slot ran."""


class SlotRows:
    """The slots of one upstream, and one store."""

    def __init__(
        self,
        backend: LlamaServerBackend,
        tiers: Tiers,
        spec: ImageSpec,
        checkpoint_tier: CheckpointTier | None,
        workers: ThreadPoolExecutor,
    ) -> None:
        """checkpoint_tier: needed for a kind that has a state"""
        self.spec = spec
        self._checkpoint_tier = checkpoint_tier
        self._has_drafts = backend.probe.speculative
        self._upstream = backend.upstream
        self._slotdir = backend.slotdir
        self._tiers = tiers
        self._workers = workers

    # ---- out of a slot ----------------------------------------------------------------------

    async def capture(self, slot: Slot) -> tuple[SlotImage, int, SlotAction]:
        """Save `slot` and store what is new in it: its tokens as the server has them, how many of their
        rows went into the store, and what the save took. The caller keeps it from being used.

        Raises TowerdError, also when the file is not what it should be."""
        image, done = await self.save(slot.id)
        loop = asyncio.get_running_loop()
        return image, await loop.run_in_executor(self._workers, self._keep, image, slot), done

    async def save(self, slot: int) -> tuple[SlotImage, SlotAction]:
        """What a slot holds, and what the save took. Raises as `capture`."""
        loop = asyncio.get_running_loop()
        name = self._slotdir.new_name()
        try:
            done = await self._upstream.save(slot, name)
        except BaseException:
            await loop.run_in_executor(self._workers, self._slotdir.remove, name)
            raise
        return await loop.run_in_executor(self._workers, self._read, name, done.n_bytes), done

    def _read(self, name: str, n_bytes: int) -> SlotImage:
        try:
            data = self._slotdir.take(name)
            if len(data) != n_bytes:
                raise StateError(f"{n_bytes} bytes were written, {len(data)} are there")
            if self.spec.kind.has_state:
                image = parse_state_image(data, self.spec)
            else:
                image = parse_image(data, cell_ext=self.spec.layout.cell_ext)
        except (OSError, StateError) as error:
            raise TowerdError(f"A saved slot cannot be read: {error}.") from error
        if image.spec(self.spec.window).layout != self.spec.layout:
            raise TowerdError("A saved slot has another layout than the probe had.")
        return image

    def _keep(self, image: SlotImage, slot: Slot) -> int:
        # Tokens other than the known ones come from a reply whose ids are not certain, or from a
        # request that was cut off: they are computed rows, after the known ones.
        provenance = slot.provenance_of(image.n)
        try:
            return self._store(image, slot, provenance)
        except SessionDeleted:
            return 0

    def _store(self, image: SlotImage, slot: Slot, provenance: Provenances) -> int:
        store, tokens, scope = self._tiers.store, image.tokens, slot.scope
        if store.match(tokens, scope).n < image.n:
            store.insert(tokens, scope, [image.n], slot.since)
        n_kept = 0
        if self.spec.kind.has_rows:
            for gap in self._tiers.gaps(tokens, scope, provenance):
                rows = image.rows(self.spec.layout, gap.p0, gap.p1)
                # A copy, so that rows in the hot tier do not keep the file's memory.
                self._tiers.accept(gap, rows.copy())
                n_kept += gap.p1 - gap.p0
        if image.state is not None and are_storable(provenance):
            assert self._checkpoint_tier is not None
            taken = image.state.checkpoint(), not are_exact(provenance)
            self._checkpoint_tier.keep(tokens, scope, {image.n: taken})
            n_kept = n_kept or max(0, image.n - slot.n_stored)
        return n_kept

    # ---- into a slot ------------------------------------------------------------------------

    async def restore(
        self, slot: int, ids: Ids, plan: RestorePlan, room: Awaitable[None]
    ) -> Restored | None:
        """Fill `slot` with the rows that `plan` found for `ids`; None when none of them can be
        used after all (the slot is as it was). Raises TowerdError, and what `room` raises.

        room: awaited before llama-server reads; it frees cells while the file is written"""
        try:
            return await self._fill(slot, partial(self._write_plan, slot, ids, plan), room)
        except InvalidRequest:
            if self.spec.kind is WHOLE and plan.checkpoint is not None:
                assert self._checkpoint_tier is not None
                self._checkpoint_tier.refused(plan.checkpoint)
            raise

    async def put(self, slot: int, tokens: Ids, parts: Sequence[KVRows]) -> Restored:
        """Fill `slot` with the rows of `tokens`, native ones of layers without a window; there is room.
        Raises TowerdError."""

        def write(name: str) -> Restored:
            began = time.perf_counter()
            self._write(name, slot, tokens, parts, ())
            ms = (time.perf_counter() - began) * 1e3
            return Restored(len(tokens), 0, 0, np.zeros(0, np.uint8), ms)

        done = await self._fill(slot, write)
        assert done is not None
        return done

    async def _fill(
        self,
        slot: int,
        write: Callable[[str], Restored | None],
        room: Awaitable[None] | None = None,
    ) -> Restored | None:
        """Have llama-server restore a file that `write` fills on a worker; None if it writes none."""
        loop = asyncio.get_running_loop()
        name = self._slotdir.new_name()
        writing = loop.run_in_executor(self._workers, write, name)
        try:
            try:
                if room is not None:
                    await room
            finally:
                restored = await writing
            if restored is None:
                return None
            asked = time.perf_counter()
            if self._has_drafts:  # whose own cache a restore leaves as it is
                await self._upstream.erase(slot)
            done = await self._upstream.restore(slot, name)
        finally:
            # Not awaited, so that the request can continue.
            self._workers.submit(self._slotdir.remove, name)
        if done.n_tokens != restored.n:
            raise TowerdError(f"llama-server restored {done.n_tokens} of {restored.n} tokens.")
        restored.ms += (time.perf_counter() - asked) * 1e3
        restored.n_bytes, restored.blocked_ms = done.n_bytes, done.ms
        return restored

    def _write_plan(self, slot: int, ids: Ids, plan: RestorePlan, name: str) -> Restored | None:
        began = time.perf_counter()
        parts: list[KVRows] = []
        ends: list[tuple[int, bool]] = []
        provenances: list[Provenances] = []
        for part, rows in self._tiers.rows(plan):
            parts.append(rows)
            ends.append((part.p1, part.tier == "hot"))
            provenances.append(part.provenance)
        if plan.checkpoint is not None:
            return self._write_state(slot, ids, plan, parts, provenances, name)
        n = usable(self.spec, parts, parts[-1].p1) if parts else 0
        if n == 0:
            return None
        parts = [part.slice(part.p0, min(part.p1, n)) for part in parts if part.p0 < n]
        window = window_rows(self.spec, parts, n)
        self._write(name, slot, ids[:n], parts, window)
        window_from = window[-1].p1 - sum(map(len, window)) + 1 if len(window) > 1 else 0
        provenance, ms = np.concatenate(provenances)[:n], (time.perf_counter() - began) * 1e3
        return Restored(n, _count_hot(ends, n), window_from, provenance, ms, plan.decoded)

    def _write_state(
        self,
        slot: int,
        ids: Ids,
        plan: RestorePlan,
        parts: Sequence[KVRows],
        provenances: Sequence[Provenances],
        name: str,
    ) -> Restored | None:
        """Write the `parts` of a plan that ends with a checkpoint, and its state."""
        began = time.perf_counter()
        checkpoint = plan.checkpoint
        assert checkpoint is not None
        assert self._checkpoint_tier is not None
        n = checkpoint.position
        if self.spec.kind.has_rows and (not parts or parts[-1].p1 < n):
            return None  # some could not be read
        try:
            state = self._checkpoint_tier.load(checkpoint)
        except StoreError as error:
            log.warning("a state checkpoint cannot be used", extra={"error": str(error)})
            return None
        self._write(name, slot, ids[:n], parts, (), state_part(state))
        worst = Provenance.APPROXIMATE if checkpoint.derived else Provenance.EXACT
        provenance = np.full(n, worst, np.uint8)
        if provenances:
            provenance = np.concatenate(provenances)[:n]
        ms = (time.perf_counter() - began) * 1e3
        return Restored(n, plan.n_hot, 0, provenance, ms, plan.decoded)

    def _write(
        self,
        name: str,
        slot: int,
        ids: Ids,
        parts: Sequence[KVRows],
        window: Sequence[KVRows],
        state: Bytes | None = None,
    ) -> None:
        n_state = 0 if state is None else len(state)
        size = image_size(self.spec, len(ids), sum(map(len, window)), n_state)
        with self._slotdir.writing(name, size) as out:
            write_image(self.spec, ids, parts, window, slot, out, state)


def _count_hot(ends: list[tuple[int, bool]], n: int) -> int:
    """How many of the first `n` tokens came from the hot tier."""
    hot = at = 0
    for end, is_hot in ends:
        stop = min(end, n)
        hot += max(0, stop - at) if is_hot else 0
        at = end
    return hot
