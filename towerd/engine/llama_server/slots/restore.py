"""SlotRestorer: composes stored rows into one slot file and restores it into a slot.

A restore replaces the whole slot, so the file always starts at token 0. llama-server reads it on
its one main thread, between two decode steps: other slots wait for that read and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.engine.llama_server.slots.image import (
    ImageSpec,
    image_size,
    usable,
    window_rows,
    write_image,
)
from towerd.engine.llama_server.slots.slotdir import SlotDir
from towerd.errors import TowerdError
from towerd.slots.rows import KVRows
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import RestorePlan
from towerd.tokens import Ids, Provenances


@dataclass(frozen=True, slots=True)
class Restored:
    """What a slot holds after a restore: the first `n` tokens, from these tiers."""

    n: int
    n_hot: int
    n_warm: int
    window_from: int
    provenance: Provenances
    n_bytes: int
    ms: float
    """Composing and restoring together."""
    restore_ms: float
    """How long llama-server's read took, in which no other slot ran."""


@dataclass(frozen=True, slots=True)
class _Written:
    n: int
    n_hot: int
    n_warm: int
    window_from: int
    provenance: Provenances
    ms: float


class SlotRestorer:
    """Writes slot files of one store for one upstream."""

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

    async def restore(
        self, slot: int, ids: Ids, plan: RestorePlan, room: Awaitable[None]
    ) -> Restored | None:
        """Fill `slot` with the rows that `plan` found for `ids`; None when none of them can be
        used after all (the slot is as it was). Raises TowerdError, and what `room` raises.

        room: awaited before llama-server reads; it frees cells while the file is written"""
        loop = asyncio.get_running_loop()
        name = self._slotdir.new_name()
        writing = loop.run_in_executor(self._workers, self._write, name, slot, ids, plan)
        try:
            try:
                await room
            finally:
                written = await writing
            if written is None:
                return None
            asked = time.perf_counter()
            done = await self._upstream.restore(slot, name)
        finally:
            # Not awaited, so that the request can continue.
            self._workers.submit(self._slotdir.remove, name)
        if done.n_tokens != written.n:
            raise TowerdError(f"llama-server restored {done.n_tokens} of {written.n} tokens.")
        return Restored(
            n=written.n,
            n_hot=written.n_hot,
            n_warm=written.n_warm,
            window_from=written.window_from,
            provenance=written.provenance,
            n_bytes=done.n_bytes,
            ms=written.ms + (time.perf_counter() - asked) * 1e3,
            restore_ms=done.ms,
        )

    def _write(self, name: str, slot: int, ids: Ids, plan: RestorePlan) -> _Written | None:
        began = time.perf_counter()
        parts: list[KVRows] = []
        ends: list[tuple[int, bool]] = []
        provenances: list[Provenances] = []
        for part, rows in self._tiers.rows(plan):
            parts.append(rows)
            ends.append((part.p1, part.tier == "hot"))
            provenances.append(part.provenance)
        n = usable(self.spec, parts, parts[-1].p1) if parts else 0
        if n == 0:
            return None
        parts = [part.slice(part.p0, min(part.p1, n)) for part in parts if part.p0 < n]
        window = window_rows(self.spec, parts, n)
        n_window = sum(map(len, window))
        with self._slotdir.writing(name, image_size(self.spec, n, n_window)) as out:
            write_image(self.spec, ids[:n], parts, window, slot, out)
        window_from = window[-1].p1 - n_window + 1 if len(window) > 1 else 0
        n_hot = _count_hot(ends, n)
        provenance, ms = np.concatenate(provenances)[:n], (time.perf_counter() - began) * 1e3
        return _Written(n, n_hot, n - n_hot, window_from, provenance, ms)


def _count_hot(ends: list[tuple[int, bool]], n: int) -> int:
    """How many of the first `n` tokens came from the hot tier."""
    hot = at = 0
    for end, is_hot in ends:
        stop = min(end, n)
        hot += max(0, stop - at) if is_hot else 0
        at = end
    return hot
