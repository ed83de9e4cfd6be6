"""LlamaServerEngine: any number of conversations in the few slots of a real llama-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from towerd.engine.base import (
    Embeds,
    GenerateRequest,
    Kept,
    ModelInfo,
    ModuleMaker,
    SlotView,
    check_text,
    encode,
)
from towerd.engine.llama_server.generation import LlamaServerGeneration
from towerd.engine.llama_server.process.availability import Availability
from towerd.engine.llama_server.process.backend import LlamaServerBackend
from towerd.engine.llama_server.process.description import ModelDescription
from towerd.engine.llama_server.process.upstream_adapters import UpstreamAdapters
from towerd.engine.llama_server.process.upstream_counters import without
from towerd.engine.llama_server.process.upstream_weights import UpstreamWeights
from towerd.engine.llama_server.running import running_views
from towerd.engine.llama_server.slots.expected_reuse import expect_reuse
from towerd.engine.llama_server.slots.launch_gate import LaunchGate
from towerd.engine.llama_server.slots.placement import SlotChoice, SlotRequest
from towerd.engine.llama_server.slots.placer import PlacedPrompt, Placer
from towerd.engine.llama_server.slots.reuse_check import ReuseCheck
from towerd.engine.llama_server.slots.slot import Slot
from towerd.engine.llama_server.slots.slot_lease import SlotLease
from towerd.engine.llama_server.slots.slot_table import SlotTable
from towerd.engine.llama_server.slots.slot_upkeep import SlotUpkeep
from towerd.engine.llama_server.slots.unpinned_request import UnpinnedRequest
from towerd.errors import ContextExceeded, InvalidRequest, TowerdError, Unavailable
from towerd.settings.config import Config
from towerd.store import Store
from towerd.store.sessions.deletions import DeletionWatch
from towerd.system.priority import shorten_slice
from towerd.tiers.manager import Tiers
from towerd.tokens import Ids
from towerd.wire import Reply, WireThreads

LAUNCH_POLL_S = 0.05


class LlamaServerEngine:
    """Make it on the event loop; see `towerd.engine.llama_server.opening`."""

    name = "llama-server"
    embedder: Embeds | None = None
    modules: ModuleMaker | None = None
    outgrowing: Collection[str] = ()  # it refuses such a prompt even where it shifts its context

    def __init__(
        self,
        backend: LlamaServerBackend,
        described: ModelDescription,
        store: Store,
        tiers: Tiers,
        config: Config,
    ) -> None:
        found = backend.probe
        self.backend = backend
        self.upstream = backend.upstream
        self.probe = found
        self.info: ModelInfo = described.info
        self.n_ctx = found.n_ctx
        self.n_slots = found.n_slots
        self.notes: list[str] = [*found.notes, *described.notes]
        """Sentences about what does not work on this llama-server."""
        self.wire = WireThreads(described.wire)
        self.adapters = UpstreamAdapters(found.loras, described.adapter_names)
        self._vocab = described.vocab
        self.token_bytes_max = self.wire.model.token_bytes_max
        self.text_bytes_max = config.text_bytes_max(found.n_ctx)
        self._workers = ThreadPoolExecutor(4, "towerd-slots")
        self._text = ThreadPoolExecutor(2, "towerd-text", initializer=shorten_slice)
        """Separate from the others: a text of megabytes takes seconds."""
        self.placer = Placer(backend, tiers, self._workers, self.adapters)
        self._gate = LaunchGate()
        self.upkeep = SlotUpkeep(self.placer, backend.upstream)
        self.table = self.placer.table = SlotTable(
            self.placer.policy,
            found.n_slots,
            queue_max=config.queue_max,
            verify=self.upkeep.verify_soon,
            cells=found.cells,
        )
        self._store = store
        self._weights = UpstreamWeights(backend, described, store, self.placer, self.notes)
        self.reuse_check = ReuseCheck(self.placer, self.upkeep, self.notes)
        self._availability = Availability(backend, self.placer, self.upkeep, self._weights)
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._open: set[SlotLease] = set()
        self._generations: set[LlamaServerGeneration] = set()

    # ---- leases -----------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether llama-server can take requests now."""
        return self._availability.is_running

    def failure(self, otherwise: str) -> Unavailable:
        """The error of a request that llama-server does not answer; see `Availability.failure`."""
        return self._availability.failure(otherwise)

    @property
    def epoch(self) -> int:
        """The number of restarts of llama-server; a lease of an older epoch is void."""
        return self.placer.epoch

    async def lease(
        self,
        ids: Ids,
        scope: str,
        session: str | None,
        *,
        n_predict: int = -1,
        compose: bool = True,
    ) -> SlotLease:
        """Wait for a slot for this prompt, and bring as much of the prompt into it as is worth it.

        n_predict: maximum number of tokens of the reply; negative: no limit. compose=False: the
        client wants nothing reused. Raises Unavailable when too many wait or llama-server is not
        running, and InvalidRequest for ids out of range."""
        self._availability.check()
        ids = np.ascontiguousarray(ids, np.int32)
        self._vocab.validate(ids)
        can_reuse = compose and len(ids) < self.n_ctx
        with self.placer.path_of(ids, scope) as path:
            request = SlotRequest(
                ids, scope, cache_prompt=can_reuse, path=path, n_predict=n_predict
            )
            if not self.placer.is_continuation(request):
                await self.placer.look_up(request)
            return await self._lease(request, session)

    async def lease_opaque(self, scope: str, *, label: str) -> SlotLease:
        """A slot for a prompt whose tokens are not known (pictures, sounds): the one that
        the same (scope, label) had last, if it is free. It is never stored."""
        self._availability.check()
        return await self._lease(SlotRequest(None, scope, label), None)

    async def _lease(self, request: SlotRequest, session: str | None) -> SlotLease:
        choice = await self.table.acquire(request)
        try:
            self._availability.check()
            await self._gate.begin_placing()
        except BaseException:
            self.table.undo(choice)
            raise
        slot = choice.slot
        if self.placer.is_in_place(request, choice):
            placed = await self._place(request, choice)
        else:
            placing = asyncio.create_task(self._place(request, choice))
            try:
                placed = await asyncio.shield(placing)
            except asyncio.CancelledError:
                self.upkeep.spawn(self._put_back(slot, placing))
                raise
        lease = SlotLease(
            self, slot, request.ids, request.scope, session=session, label=request.label
        )
        lease.expected_reuse = expect_reuse(self.placer.policy, request, slot, placed)
        lease.restored = placed.restored is not None
        return self._opened(lease)

    async def _place(self, request: SlotRequest, choice: SlotChoice) -> PlacedPrompt:
        slot = choice.slot
        self.upkeep.n_preparing += 1
        try:
            placed = await self.placer.place(request, choice)
            self._availability.check()
        except BaseException as error:
            self._gate.end_placing()
            slot.hold_unknown("")
            self.table.free(slot)
            if isinstance(error, TowerdError):
                self.notice(error)
            raise
        finally:
            self.upkeep.n_preparing -= 1
        return placed

    async def _put_back(self, slot: Slot, placing: asyncio.Task[PlacedPrompt]) -> None:
        """Free a slot whose client left while it was prepared. llama-server finishes what it was
        told, so the preparation is awaited, and what was saved or restored is not lost."""
        await asyncio.wait((placing,))
        if placing.exception() is None:
            self._gate.end_placing()
            self.table.free(slot)
            self.upkeep.capture_later(slot)

    def _opened(self, lease: SlotLease) -> SlotLease:
        self._open.add(lease)
        self.upkeep.n_awaited += 1
        self._all_ended.clear()
        return lease

    @asynccontextmanager
    async def unpinned(self) -> AsyncIterator[UnpinnedRequest]:
        """Wraps a request that llama-server places itself. It starts when no lease is between its
        restore and its launch, and delays leases until it is `launched` or ends; then free slots
        are asked what they hold."""
        self._availability.check()
        self.upkeep.spawn(self._find_launched())
        await self._gate.begin_unpinned()
        request = UnpinnedRequest(self._gate, self.upkeep)
        try:
            yield request
        finally:
            request.launched()
            self.upkeep.doubt()

    async def _find_launched(self) -> None:
        """While an unpinned request waits, find leases that were launched: their slots run,
        although their first bytes have not come (a reply that is not streamed comes at its end)."""
        await asyncio.sleep(LAUNCH_POLL_S)
        while self._gate.is_awaited:
            try:
                running = {v["id"] for v in await self.upstream.slots() if v["is_processing"]}
            except TowerdError:
                return
            for lease in list(self._open):
                if lease.slot in running:
                    await lease.launched()
            await asyncio.sleep(LAUNCH_POLL_S)

    async def lora_changed(self) -> None:
        """Read the adapters' scales again: rows of requests from now on depend on them."""
        self.adapters.reread(await self.upstream.get("/lora-adapters"))

    def without_own(self, metrics: bytes) -> bytes:
        """llama-server's Prometheus text without what towerd's probe added to it; a restarted
        one was not probed."""
        return metrics if self.placer.epoch else without(metrics, self.backend.added)

    # ---- called by leases -------------------------------------------------------------------

    def placed(self) -> None:
        """Called when a lease's request was launched, or will not be."""
        self._gate.end_placing()

    def give_back(self, lease: SlotLease, slot: Slot) -> None:
        """Free the slot of a lease that ended."""
        self._open.discard(lease)
        self._weights.left(slot)
        self.table.free(slot)
        self.upkeep.capture_later(slot)
        if not self._open:
            self._all_ended.set()

    def watch_deletions(self) -> DeletionWatch:
        """What is deleted from now on."""
        return self._store.deletions.watch()

    def frozen(self, prefixes: Collection[tuple[str, bytes]]) -> None:
        """The store dropped the segments with these (scope, ids): slots that hold them are not
        saved, because that would bring them back."""
        for slot in self.table.slots:
            data = slot.tokens.tobytes()
            if any(slot.scope == scope and data.startswith(ids) for scope, ids in prefixes):
                slot.n_stored = slot.n

    def notice(self, error: TowerdError) -> None:
        """Called when a request to llama-server failed."""
        self._availability.notice(error)

    # ---- the engine protocol ----------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> LlamaServerGeneration:
        self._availability.check()
        if len(request.ids) == 0:
            raise InvalidRequest("The prompt has no tokens.")
        if len(request.ids) >= self.n_ctx:
            raise ContextExceeded.of_request(len(request.ids), self.n_ctx)
        generation = LlamaServerGeneration(self, request)
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

    async def apply_template(self, body: Mapping[str, Any]) -> str:
        data = encode(body)
        reply = await self.wire.call(len(data), self.wire.model.apply_template, data)
        return str(msgspec.json.decode(reply)["prompt"])

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
        return [slot.view(self.n_ctx) for slot in self.table.slots]

    async def running(self) -> list[SlotView]:
        return await running_views(list(self._open), self.upstream, self.n_ctx)

    async def kept(self, ids: Ids, scope: str) -> Kept | None:
        """A llama-server keeps all of a chat, or moves it in ways of its own."""
        return None

    def stats(self) -> dict[str, Any]:
        counters = self.placer.counters
        process = self.backend.process
        spec = self.probe.spec
        return {
            **asdict(counters),
            "running": self.table.n_busy,
            "waiting": self.table.n_waiting,
            "slots": self.n_slots,
            "live_cells": self.probe.cells or self.n_ctx * self.n_slots,
            "live_cells_used": sum(slot.n for slot in self.table.slots),
            "bytes_in": counters.restore_bytes,
            "bytes_out": counters.save_bytes,
            "can_slice": self.placer.can_compose,
            "why_not_sliceable": "" if self.placer.can_compose else " ".join(self.notes),
            "reuse_works": int(self.placer.can_compose),
            "restarts": process.restarts if process is not None else 0,
            "upstream_build": self.probe.build.text,
            "upstream_running": int(self.is_running),
            "slot_dir_in_ram": int(self.backend.slotdir.in_ram),
            "window": self.placer.policy.window,
            "n_stream": spec.n_stream if spec is not None else 0,
            "v_trans": int(spec.v_trans) if spec is not None else 0,
            "notes": list(self.notes),
        }

    async def settle(self) -> None:
        """Save every idle slot with rows that the store lacks."""
        await self.upkeep.settle()

    async def drain(self, grace_s: float) -> None:
        if self.backend.process is not None:
            self.backend.process.wake()
        try:
            await asyncio.wait_for(self._all_ended.wait(), grace_s)
        except TimeoutError:
            self._availability.is_draining = True
            for generation in list(self._generations):
                generation.stop()
        self._availability.drain()

    async def close(self) -> None:
        """Save the rows that only slots hold, if llama-server still runs."""
        self._availability.is_draining = True
        await self._weights.close()
        for generation in list(self._generations):
            generation.stop()
            await asyncio.wait((generation.task,))
        await asyncio.to_thread(self.wire.close)
        await self.upkeep.close(save=self.is_running)
        await self._availability.close()
        await asyncio.to_thread(self._workers.shutdown)
        self._text.shutdown(wait=False)
