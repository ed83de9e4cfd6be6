"""LlamaServerEngine: any number of conversations in the few slots of a real llama-server."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from towerd.engine.base import (
    Embeds,
    GenerateRequest,
    Kept,
    ModelInfo,
    SlotView,
    check_text,
)
from towerd.engine.checkpoint_positions import CheckpointPositions
from towerd.engine.llama_server.availability import Availability
from towerd.engine.llama_server.generation import LlamaServerGeneration
from towerd.engine.llama_server.process.backend import LlamaServerBackend
from towerd.engine.llama_server.process.description import ModelDescription, has_ram_cache
from towerd.engine.llama_server.process.upstream_adapters import UpstreamAdapters
from towerd.engine.llama_server.process.upstream_counters import without
from towerd.engine.llama_server.slots.holds import SlotHolds
from towerd.engine.llama_server.slots.placer import StateParts
from towerd.engine.llama_server.upstream_weights import UpstreamWeights
from towerd.engine.moving.rotation import Rotation
from towerd.engine.moving.runs import MovedRuns
from towerd.errors import ContextExceeded, InvalidRequest
from towerd.settings.config import Config
from towerd.slots.image import ImageSpec
from towerd.store import Store
from towerd.system.priority import shorten_slice
from towerd.tiers.checkpoint_tier import CheckpointTier
from towerd.tiers.manager import Tiers
from towerd.tokens import Ids
from towerd.wire import Reply, WireThreads


class LlamaServerEngine:
    """Make it on the event loop; see `towerd.engine.llama_server.opening`."""

    name = "llama-server"
    embedder: Embeds | None = None
    outgrowing: Collection[str] = ()  # it refuses such a prompt even where it shifts its context

    def __init__(
        self,
        backend: LlamaServerBackend,
        described: ModelDescription,
        store: Store,
        tiers: Tiers,
        config: Config,
        checkpoint_tier: CheckpointTier | None,
    ) -> None:
        """checkpoint_tier: needed for a model whose memory has a state"""
        found = backend.probe
        self.backend = backend
        self.upstream = backend.upstream
        self.probe = found
        self.info: ModelInfo = described.info
        self.n_ctx = found.n_ctx
        self.n_slots = found.n_slots
        self.notes: list[str] = [*found.notes, *described.notes, *_advice(backend)]
        """Sentences about what does not work on this llama-server."""
        self.wire = WireThreads(described.wire)
        self.adapters = UpstreamAdapters(found.loras, described.adapter_names)
        self.token_bytes_max = self.wire.model.token_bytes_max
        self.text_bytes_max = config.text_bytes_max(found.n_ctx)
        self._cache_reuse = config.cache_reuse
        self._rotation = Rotation(
            described.model, described.info.row_identity, found.n_ctx, _why_not_movable(backend)
        )
        self.runs = MovedRuns(tiers, self._rotation)
        moving = self.runs, self._rotation
        self._vocab = described.vocab
        self._checkpoint_tier = checkpoint_tier
        states = None
        if checkpoint_tier is not None or (found.spec is not None and found.spec.has_window):
            every = config.checkpoint_tokens
            positions = CheckpointPositions(self._vocab.pieces, self._vocab.eog_ids, every)
            states = StateParts(checkpoint_tier, positions)
        self.holds = SlotHolds(
            backend,
            tiers,
            self.adapters,
            *moving,
            self.notes,
            queue_max=config.queue_max,
            states=states,
        )
        self._text = ThreadPoolExecutor(2, "towerd-text", initializer=shorten_slice)
        """Separate from the others: a text of megabytes takes seconds."""
        watched = store, self.holds, checkpoint_tier, self.notes
        self._weights = UpstreamWeights(backend, described, *watched)
        self.availability = Availability(backend, self.holds, self._weights)
        self._generations: set[LlamaServerGeneration] = set()

    @property
    def slot_image(self) -> ImageSpec | None:
        """See Engine.slot_image."""
        return self.probe.spec

    @property
    def why_not_movable(self) -> str:
        """See Engine.why_not_movable."""
        if self.holds.tiers.exact:
            return "--fidelity exact reuses only what prefill computes"
        if not self._cache_reuse:
            return "--cache-reuse 0 asks for none"
        return self._rotation.why_not

    async def lora_changed(self) -> None:
        """Read the adapters' scales again: rows of requests from now on depend on them."""
        self.adapters.reread(await self.upstream.get("/lora-adapters"))

    def without_own(self, metrics: bytes) -> bytes:
        """llama-server's Prometheus text without what towerd's probe added to it; a restarted
        one was not probed."""
        return metrics if self.holds.placer.epoch else without(metrics, self.backend.added)

    # ---- the engine protocol ----------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> LlamaServerGeneration:
        self.availability.check()
        if len(request.ids) == 0:
            raise InvalidRequest("The prompt has no tokens.")
        if len(request.ids) >= self.n_ctx:
            raise ContextExceeded.of_request(len(request.ids), self.n_ctx)
        if request.reuse_tokens_min is None:
            request = replace(request, reuse_tokens_min=self._cache_reuse)
        parts = self.holds, self.availability, self.adapters, self.wire
        generation = LlamaServerGeneration(*parts, request)
        self._generations.add(generation)
        generation.task.add_done_callback(lambda _: self._generations.discard(generation))
        return generation

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Ids:
        check_text(text, self.text_bytes_max)
        return await asyncio.get_running_loop().run_in_executor(
            self._text, self._vocab.tokenize, text, add_special, parse_special
        )

    async def detokenize(self, ids: Sequence[int] | Ids) -> bytes:
        array = self._vocab.validate(np.asarray(ids, np.int32))
        return await asyncio.get_running_loop().run_in_executor(
            self._text, self._vocab.detokenize, array
        )

    async def end_reasoning(self, replies: Sequence[Reply]) -> bool:
        is_any = False
        for name in filter(None, (reply.upstream_id for reply in replies)):
            asked = {"id": name, "action": "reasoning_end"}
            said = await self.upstream.post("/v1/chat/completions/control", asked)
            is_any = is_any or said.get("success") is True
        return is_any

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        return [self._vocab.pieces[i] for i in ids]

    def slots(self) -> list[SlotView]:
        return [slot.view(self.n_ctx) for slot in self.holds.table.slots]

    async def running(self) -> list[SlotView]:
        return await self.holds.running()

    async def kept(self, ids: Ids, scope: str) -> Kept | None:
        """A llama-server keeps all of a chat, or moves it in ways of its own."""
        return None

    def stats(self) -> dict[str, Any]:
        table, placer = self.holds.table, self.holds.placer
        counters = placer.counters
        process = self.backend.process
        spec = self.probe.spec
        return {
            **asdict(counters),
            **({} if self._checkpoint_tier is None else self._checkpoint_tier.stats()),
            "running": table.n_busy,
            "waiting": table.n_waiting,
            "slots": self.n_slots,
            "live_cells": self.probe.cells or self.n_ctx * self.n_slots,
            "live_cells_used": sum(slot.n for slot in table.slots),
            "bytes_in": counters.restore_bytes,
            "bytes_out": counters.save_bytes,
            "tokens_moved": self.runs.n_moved,
            "tokens_move_checked": self.runs.n_checked,
            "tokens_move_refused": self.runs.n_refused,
            "can_slice": placer.can_compose,
            "why_not_sliceable": "" if placer.can_compose else " ".join(self.notes),
            "reuse_works": int(placer.can_compose),
            "restarts": process.restarts if process is not None else 0,
            "upstream_build": self.probe.build.text,
            "upstream_running": int(self.availability.is_running),
            "slot_dir_in_ram": int(self.backend.slotdir.in_ram),
            "window": placer.policy.window,
            "n_stream": spec.n_stream if spec is not None else 0,
            "v_trans": int(spec.v_trans) if spec is not None else 0,
            "notes": list(self.notes),
        }

    async def settle(self) -> None:
        """Save every idle slot with rows that the store lacks."""
        await self.holds.upkeep.settle()

    async def drain(self, grace_s: float) -> None:
        if self.backend.process is not None:
            self.backend.process.wake()
        try:
            await asyncio.wait_for(self.holds.all_ended.wait(), grace_s)
        except TimeoutError:
            self.availability.is_draining = True
            for generation in list(self._generations):
                generation.stop()
        self.availability.drain()

    async def close(self) -> None:
        """Save the rows that only slots hold, if llama-server still runs."""
        self.availability.is_draining = True
        await self._weights.close()
        for generation in list(self._generations):
            generation.stop()
            await asyncio.wait((generation.task,))
        await asyncio.to_thread(self.wire.close)
        await self.holds.close(save=self.availability.is_running)
        await self.availability.close()
        self._text.shutdown(wait=False)


def _advice(backend: LlamaServerBackend) -> tuple[str, ...]:
    """What to do about a llama-server whose slots cannot be restored; nothing where its model's file is
    not here."""
    if backend.probe.can_compose or not Path(backend.probe.model_path).is_file():
        return ()
    return (
        "The embedded engine keeps the state of this model's chats: start towerd with "
        f"-m {backend.probe.model_path} and without --engine llama-server or --upstream.",
    )


def _why_not_movable(backend: LlamaServerBackend) -> str:
    """Why rows cannot be put behind other text in its slots, whatever their rotation; "" if they can."""
    found = backend.probe
    if not found.can_compose or found.spec is None:
        return "the slots of this llama-server cannot be restored"
    if found.spec.kind.has_state:
        return found.spec.kind.why_not_movable
    if found.spec.has_window:
        return "it has sliding-window layers, which a llama-server saves the last rows of alone"
    if backend.command is None or not Path(found.model_path).is_file():
        return "the file or the command line of this llama-server cannot be seen"
    if has_ram_cache(backend.command):
        return "its RAM cache would bring them back unasked: start it with --cache-ram 0"
    return ""
