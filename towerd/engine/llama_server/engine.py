"""LlamaServerEngine: conversations of any number in the few slots of a real llama-server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from towerd.config import Config
from towerd.engine.base import Embeds, GenerateRequest, Kept, ModelInfo, ModuleMaker, SlotView
from towerd.engine.llama_server.generation import LlamaServerGeneration
from towerd.engine.llama_server.process.backend import Backend
from towerd.engine.llama_server.process.describe import Described
from towerd.engine.llama_server.process.weights import Weights
from towerd.engine.llama_server.slots.foretell import Foretold, foretell
from towerd.engine.llama_server.slots.gate import Gate
from towerd.engine.llama_server.slots.lease import Lease
from towerd.engine.llama_server.slots.placement import Choice, Slot, Want
from towerd.engine.llama_server.slots.placer import Placed, Placer
from towerd.engine.llama_server.slots.slot_table import SlotTable
from towerd.engine.llama_server.slots.spoken import Spoken
from towerd.engine.llama_server.slots.unpinned import Unpinned
from towerd.engine.llama_server.slots.upkeep import Upkeep
from towerd.engine.llama_server.tally import without
from towerd.errors import ContextExceeded, InvalidRequest, NotSupported, TowerdError, Unavailable
from towerd.store import Store
from towerd.tiers.manager import Tiers
from towerd.tokens import Ids
from towerd.wakeup import shorten_slice

if TYPE_CHECKING:
    from towerd.wire import WireThreads

log = logging.getLogger(__name__)

POLL_S = 0.5
LAUNCH_POLL_S = 0.05
MISSES_MAX = 5
"""After so many restores in a row that were not used, no more are tried."""
_TEMPLATE_TOKENS = 256
"""More than a chat template puts around a few messages."""
_NO_IDS: Ids = np.zeros(0, np.int32)


class LlamaServerEngine:
    """Make it on the event loop; see `towerd.engine.llama_server.opening`."""

    name = "llama-server"
    wire: WireThreads | None = None
    embedder: Embeds | None = None
    adapters: None = None
    modules: ModuleMaker | None = None
    outgrowing: Collection[str] = ()  # it refuses such a prompt even where it shifts its context

    def __init__(
        self,
        backend: Backend,
        described: Described,
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
        """What does not work on this llama-server, in sentences."""
        self._vocab = described.vocab
        self._store = store
        self._workers = ThreadPoolExecutor(4, "towerd-slots")
        self._text = ThreadPoolExecutor(2, "towerd-text", initializer=shorten_slice)
        """Apart from the others: a text of megabytes takes seconds."""
        self.placer = Placer(backend, tiers, self._workers)
        self._gate = Gate()
        self.upkeep = Upkeep(self.placer, backend.upstream)
        self.table = self.placer.table = SlotTable(
            self.placer.policy,
            found.n_slots,
            queue_max=config.queue_max,
            verify=self.upkeep.verify_soon,
        )
        self._weights = Weights(backend, described, store, self.placer, self.notes)
        self._misses = 0
        self._lora_differs = False
        self._is_reachable = True
        self._is_draining = False
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._open: set[Lease] = set()
        self._generations: set[LlamaServerGeneration] = set()
        if backend.process is not None:
            backend.process.on_exit = self._upstream_ended
            backend.process.on_start = self._weights.reloaded

    # ---- leases -----------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether llama-server can be asked now."""
        process = self.backend.process
        return self._is_reachable and (process is None or process.is_running)

    @property
    def epoch(self) -> int:
        """Counts restarts of llama-server; what an older lease knows is void."""
        return self.placer.epoch

    async def lease(
        self,
        ids: Ids,
        scope: str,
        session: str | None,
        *,
        compose: bool = True,
        pinned: bool = True,
    ) -> Lease:
        """A slot for this prompt, with as much of it in place as is worth it.

        compose=False: the client wants nothing reused
        pinned=False: the request cannot name its slot; it is one that llama-server picks itself
        when it holds all of the prompt but the last token
        Waits for a slot; raises Unavailable when
        too many wait, or when llama-server is not there, InvalidRequest for ids out of range."""
        self._check_running()
        ids = np.ascontiguousarray(ids, np.int32)
        if self._lora_differs or not len(ids):
            return await self.lease_opaque(scope, label=session or "")
        if self._vocab is not None:
            self._vocab.validate(ids)
        can_reuse = compose and len(ids) < self.n_ctx
        want = Want(ids, scope, cache_prompt=can_reuse, pinned=pinned)
        if not self.placer.is_continuation(want):
            await self.placer.look_up(want)
        return await self._lease(want, session)

    async def lease_opaque(self, scope: str, *, label: str) -> Lease:
        """A slot for a prompt whose tokens nobody knows (images, adapters of its own): the one
        that the same (scope, label) had last, if it is free. Nothing of it is ever stored."""
        self._check_running()
        return await self._lease(Want(None, scope, label), None)

    async def _lease(self, want: Want, session: str | None) -> Lease:
        choice = await self.table.acquire(want)
        try:
            self._check_running()
            await self._gate.begin_placing()
        except BaseException:
            self.table.undo(choice)
            raise
        slot = choice.slot
        goes_on = self.placer.policy.begins_with(want, slot)
        if self.placer.is_in_place(want, choice):
            placed = await self._place(want, choice)
        else:
            placing = asyncio.create_task(self._place(want, choice))
            try:
                placed = await asyncio.shield(placing)
            except asyncio.CancelledError:
                self.upkeep.spawn(self._put_back(slot, placing))
                raise
        slot.is_gone_on_with = goes_on and placed.restored is None
        lease = Lease(self, slot, want.ids, want.scope, session=session, label=want.label)
        lease.foretold = foretell(self.placer.policy, want, slot, placed)
        lease.restored = placed.restored is not None
        return self._opened(lease)

    async def _place(self, want: Want, choice: Choice) -> Placed:
        slot = choice.slot
        self.upkeep.n_preparing += 1
        try:
            placed = await self.placer.place(want, choice)
            self._check_running()
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

    async def _put_back(self, slot: Slot, placing: asyncio.Task[Placed]) -> None:
        """Who asked has left while the slot was prepared. llama-server does what it was told all
        the same, so that is followed to its end, and what was saved or restored is not lost."""
        await asyncio.wait((placing,))
        if placing.exception() is None:
            self._gate.end_placing()
            self.table.free(slot)
            self.upkeep.capture_later(slot)

    def _opened(self, lease: Lease) -> Lease:
        self._open.add(lease)
        self.upkeep.n_awaited += 1
        self._all_ended.clear()
        return lease

    def lease_chat(self, spoken: Spoken, scope: str, session: str | None) -> Lease | None:
        """The slot of a chat that goes on where it sits, before its tokens are known (see
        `Lease.learn`); None when there is something to decide first."""
        if self._is_draining or self._lora_differs or not self.is_running:
            return None
        slot = self.table.slot_of_chat(spoken, scope)
        if slot is None or slot.chat is None:
            return None
        n = slot.n + spoken.bytes_after(slot.chat.n) + _TEMPLATE_TOKENS
        if n >= self.n_ctx or not self.placer.has_room(slot, n) or not self._gate.try_placing():
            return None
        self.table.take(slot, scope)
        self.placer.counters.chats_gone_on += 1
        return self._opened(Lease(self, slot, None, scope, session=session))

    def learned(self, ids: Ids, slot: Slot) -> Foretold:
        """The tokens of a chat that goes on in this slot are known."""
        want, policy = Want(ids, slot.scope), self.placer.policy
        slot.is_gone_on_with = policy.begins_with(want, slot)
        live, _ = policy.live(want, slot)
        return foretell(policy, want, slot, Placed(min(live, want.n - 1), None))

    @asynccontextmanager
    async def unpinned(self, scope: str) -> AsyncIterator[Unpinned]:
        """Around a request that llama-server places itself. It starts when no lease is between
        its restore and its launch, and holds leases up until it is `launched` or ends; then free
        slots are asked what they hold."""
        self._check_running()
        self.upkeep.spawn(self._find_launched())
        await self._gate.begin_unpinned()
        request = Unpinned(self._gate, self.upkeep)
        try:
            yield request
        finally:
            request.launched()
            self.upkeep.doubt()

    async def _find_launched(self) -> None:
        """While an unpinned request waits: a lease whose slot runs has been launched, though
        nobody has seen its first byte yet (a reply that is not streamed has only one)."""
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
        """Read the adapters' scales again. While they differ from those at the start, nothing is
        stored or restored, because rows depend on them."""
        loras = await self.upstream.get("/lora-adapters")
        before = [each["scale"] for each in self.probe.loras]
        self._lora_differs = [each["scale"] for each in loras] != before
        for slot in self.table.slots:
            if not slot.busy:
                slot.hold_unknown("")

    def without_own(self, metrics: bytes) -> bytes:
        """llama-server's Prometheus text without what towerd's probe added to it; a restarted
        one was not probed."""
        return metrics if self.placer.epoch else without(metrics, self.backend.added)

    # ---- what a lease tells -----------------------------------------------------------------

    def placed(self) -> None:
        """A lease's request was launched, or will not be."""
        self._gate.end_placing()

    def give_back(self, lease: Lease, slot: Slot) -> None:
        """A lease ended."""
        self._open.discard(lease)
        self._weights.left(slot)
        self.table.free(slot)
        self.upkeep.capture_later(slot)
        if not self._open:
            self._all_ended.set()

    def misplaced(self) -> None:
        """A request ran in another slot than the one that was prepared."""
        self.upkeep.doubt()

    def observe(self, lease: Lease, cache_n: int | None, prompt_ms: float | None) -> None:
        """Compare what the reply says with what was prepared for it."""
        if cache_n is None or lease.ids is None:
            return
        if prompt_ms is not None:
            self.placer.policy.costs.observe_prefill(len(lease.ids) - cache_n, prompt_ms)
        n_live_max, expected = lease.foretold.n_live_max, lease.foretold.expected
        if n_live_max is not None and cache_n > n_live_max:
            # It moved rows from elsewhere in the slot (--cache-reuse): no exact ones.
            lease.is_exact = False
        if expected is None or lease.is_stale:
            return
        if cache_n >= expected:
            self._misses = 0 if lease.restored else self._misses
        elif lease.restored:
            self._restore_missed(expected, cache_n)
        else:
            self.placer.counters.live_missed += 1
            self.upkeep.doubt()  # maybe it was restarted behind our back

    def _restore_missed(self, expected: int, cache_n: int) -> None:
        self.placer.counters.restores_missed += 1
        self._misses += 1
        log.warning("a restored slot was not used", extra={"restored": expected, "used": cache_n})
        if self._misses < MISSES_MAX or not self.placer.can_compose:
            return
        self.placer.stop_composing()
        note = (
            f"Nothing is restored any more: {self._misses} restored slots in a row were not used, "
            "so this llama-server computes everything anyway."
        )
        self.notes.append(note)
        log.error(note)

    async def guess(self, text: str) -> Ids:
        """The tokens that a reply of this text probably had."""
        if not text:
            return _NO_IDS
        return await self.tokenize(text, add_special=False, parse_special=True)

    def frozen(self, prefixes: Collection[tuple[str, bytes]]) -> None:
        """The store let go of the segments with these (scope, ids): slots that hold them are not
        saved, which would bring them back."""
        for slot in self.table.slots:
            data = slot.tokens.tobytes()
            if any(slot.scope == scope and data.startswith(ids) for scope, ids in prefixes):
                slot.n_stored = slot.n

    # ---- llama-server's life ----------------------------------------------------------------

    def _check_running(self) -> None:
        if self._is_draining:
            raise Unavailable("towerd is shutting down; try again when it is back.")
        if not self.is_running:
            raise Unavailable("llama-server is being started again; try again in a moment.")

    def _upstream_ended(self) -> None:
        """Every slot is empty, and who waits is told."""
        process = self.backend.process
        reason = process.exit_reason if process is not None else "does not answer any more"
        self.placer.epoch += 1
        for slot in self.table.slots:
            slot.forget()
        self.table.fail_waiting(Unavailable(f"llama-server {reason}; try again in a moment."))

    def notice(self, error: TowerdError) -> None:
        """A request to llama-server failed. If an attached one is not there any more, wait for
        it; one of our own is watched anyway."""
        is_ours = self.backend.process is not None
        if is_ours or not self._is_reachable or not isinstance(error, Unavailable):
            return
        self._is_reachable = False
        self._upstream_ended()
        self.upkeep.spawn(self._wait_reachable())

    async def _wait_reachable(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if self._is_draining or await self.upstream.is_healthy():
                break
        for slot in self.table.slots:
            slot.hold_unknown("")  # maybe it was only the way there that was broken
        await self._weights.reloaded()
        self._is_reachable = True

    # ---- the engine protocol ----------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> LlamaServerGeneration:
        self._check_running()
        if len(request.ids) == 0:
            raise InvalidRequest("The prompt has no tokens.")
        if len(request.ids) >= self.n_ctx:
            raise ContextExceeded.of_request(len(request.ids), self.n_ctx)
        generation = LlamaServerGeneration(self, request)
        self._generations.add(generation)
        generation.task.add_done_callback(lambda _: self._generations.discard(generation))
        return generation

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Ids:
        if self._vocab is None:
            return await self.upstream.tokenize(
                text, add_special=add_special, parse_special=parse_special
            )
        return await asyncio.get_running_loop().run_in_executor(
            self._text, self._vocab.tokenize, text, add_special, parse_special
        )

    async def detokenize(self, ids: Sequence[int] | Ids) -> bytes:
        if self._vocab is None:
            return (await self.upstream.detokenize(ids)).encode()
        array = self._vocab.validate(np.asarray(ids, np.int32))
        return await asyncio.get_running_loop().run_in_executor(
            self._text, self._vocab.detokenize, array
        )

    async def apply_template(self, body: Mapping[str, Any]) -> str:
        return await self.upstream.apply_template(body)

    async def text_of_chat(self, data: bytes | bytearray) -> str:
        """A chat request, as its client wrote it, to the prompt text. Raises TowerdError."""
        return await self.upstream.text_of_chat(data)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        if self._vocab is None:
            raise NotSupported("The model file is not readable here, so tokens have no bytes.")
        return [self._vocab.pieces[i] for i in ids]

    def slots(self) -> list[SlotView]:
        return [slot.view(self.n_ctx) for slot in self.table.slots]

    async def kept(self, ids: Ids, scope: str) -> Kept | None:
        """A llama-server keeps all of a chat, or moves it in ways of its own."""
        return None

    def stats(self) -> dict[str, Any]:
        counters = self.placer.counters
        process = self.backend.process
        spec = self.probe.spec
        return {
            **counters.as_stats(),
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
        """Save every idle slot that has rows which the store lacks."""
        await self.upkeep.settle()

    async def drain(self, grace_s: float) -> None:
        try:
            await asyncio.wait_for(self._all_ended.wait(), grace_s)
        except TimeoutError:
            self._is_draining = True
            for generation in list(self._generations):
                generation.stop()
        self._is_draining = True
        self.table.fail_waiting(Unavailable("towerd is shutting down; try again when it is back."))

    async def close(self) -> None:
        """Save what only slots hold, as far as llama-server is still there."""
        self._is_draining = True
        await self._weights.close()
        for generation in list(self._generations):
            generation.stop()
            await asyncio.wait((generation.task,))
        await self.upkeep.close(save=self.is_running)
        await asyncio.to_thread(self._workers.shutdown)
        self._text.shutdown(wait=False)
