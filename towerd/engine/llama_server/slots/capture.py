"""Capturer: saves slots, and stores the rows that the store lacks.

llama-server can only save a whole slot. The file is in RAM for a moment; only the delta reaches the
hot tier and the disk.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.engine.llama_server.slots.image import ImageSpec, SlotImage, parse_image
from towerd.engine.llama_server.slots.slot import Slot
from towerd.engine.llama_server.slots.slotdir import SlotDir
from towerd.errors import SessionDeleted, TowerdError
from towerd.slots.errors import StateError
from towerd.tiers.manager import Tiers
from towerd.tokens import Provenances, has_derived


@dataclass(frozen=True, slots=True)
class Captured:
    """A saved slot: its tokens as the server has them, all of which are stored now."""

    image: SlotImage
    n_kept: int
    """Tokens whose rows went into the store."""
    n_bytes: int
    save_ms: float
    """How long llama-server's write took, in which no slot ran."""


class Capturer:
    """Saves slots of one upstream into one store."""

    def __init__(
        self,
        upstream: UpstreamClient,
        slotdir: SlotDir,
        tiers: Tiers,
        spec: ImageSpec,
        workers: ThreadPoolExecutor,
    ) -> None:
        self.spec = spec
        self._upstream = upstream
        self._slotdir = slotdir
        self._tiers = tiers
        self._workers = workers

    async def capture(self, slot: Slot) -> Captured:
        """Save `slot` and store what is new in it. The caller keeps it from being used.

        Raises TowerdError, also when the file is not what it should be."""
        loop = asyncio.get_running_loop()
        name = self._slotdir.new_name()
        try:
            done = await self._upstream.save(slot.id, name)
        except BaseException:
            await loop.run_in_executor(self._workers, self._slotdir.remove, name)
            raise
        image, n_kept = await loop.run_in_executor(self._workers, self._keep, name, slot)
        return Captured(image, n_kept, done.n_bytes, done.ms)

    def _keep(self, name: str, slot: Slot) -> tuple[SlotImage, int]:
        try:
            data = self._slotdir.take(name)
            image = parse_image(data, cell_ext=self.spec.layout.cell_ext)
        except (OSError, StateError) as error:
            raise TowerdError(f"A saved slot cannot be read: {error}.") from error
        if image.spec(self.spec.window).layout != self.spec.layout:
            raise TowerdError("A saved slot has another layout than the probe had.")
        # Tokens other than the known ones come from a reply whose ids were not reported, or from
        # a request that was cut off: they are computed rows, after the known ones.
        provenance = slot.provenance_of(image.n)
        try:
            return image, self._store(image, slot, provenance)
        except SessionDeleted:
            return image, 0

    def _store(self, image: SlotImage, slot: Slot, provenance: Provenances) -> int:
        store, tokens, scope = self._tiers.store, image.tokens, slot.scope
        if store.match(tokens, scope).n < image.n:
            store.insert(tokens, scope, [image.n], slot.since)
        n_kept = 0
        for gap in self._tiers.gaps(tokens, scope, provenance):
            rows = image.rows(self.spec.layout, gap.p0, gap.p1)
            derived = has_derived(provenance[gap.p0 : gap.p1])
            # A copy, so that rows in the hot tier do not keep the file's memory.
            self._tiers.accept(gap, rows.copy(), derived=derived)
            n_kept += gap.p1 - gap.p0
        return n_kept
