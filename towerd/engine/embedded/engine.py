"""EmbeddedEngine: the asyncio interface to the inference thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from towerd.engine.base import (
    CLOSING,
    Embeds,
    Finish,
    GenerateRequest,
    Generation,
    Kept,
    LiveBudget,
    SlotView,
    Started,
    check_text,
    encode,
)
from towerd.engine.embedded.calibration.calibrate import Calibrator
from towerd.engine.embedded.context.core import Core, open_wire
from towerd.engine.embedded.context.embedding import Embedder
from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.parts import Parts
from towerd.engine.embedded.run.drafts import open_drafts
from towerd.engine.embedded.run.scheduler import Scheduler
from towerd.errors import (
    ConfigError,
    ContextExceeded,
    InvalidRequest,
    NotSupported,
    TowerdError,
    Unavailable,
)
from towerd.media_ids import is_token, spans_of
from towerd.model.retokenize import Retokenizer
from towerd.settings.config import RETENTIONS, Config
from towerd.slots.image import ImageSpec
from towerd.slots.kind import DENSE
from towerd.tiers.checkpoint_tier import CheckpointTier
from towerd.tiers.manager import Tiers
from towerd.tokens import Ids
from towerd.wire import Reply, Request, WireThreads

_HEAD_START_S = 1e-3
"""Time for the event loop to send a first token before the next step uses every core: without it
the token reaches the client 2 ms later."""
_TEXT_CHARS_MAX = 64 * 1024
"""Longer texts are tokenized one at a time, on a separate thread."""


class EmbeddedGeneration(Generation):
    """A request whose job the inference thread runs."""

    def __init__(self, job: Job, scheduler: Scheduler) -> None:
        super().__init__()
        self.job = job
        self._scheduler = scheduler

    def stop(self) -> None:
        self._scheduler.cancel(self.job)

    def release(self) -> None:
        self._scheduler.release(self.job)


class EmbeddedEngine:
    """One model in this process. Make it on the event loop's thread, then `start()`."""

    name = "embedded"

    def __init__(
        self,
        core: Core,
        tiers: Tiers,
        config: Config,
        checkpoint_tier: CheckpointTier | None = None,
    ) -> None:
        """checkpoint_tier: needed for a model whose memory has a state"""
        self.info = core.info
        self.retokenizer = Retokenizer(core.vocab)
        self.wire = WireThreads(open_wire(core, config, self.retokenizer))
        self.adapters = core.adapters
        self.embedder: Embeds | None = None
        self._embedder: Embedder | None = None
        if config.embeddings or config.reranking:
            self._embedder = self.embedder = Embedder(core.model, config, core.n_ctx, core.adapters)
        self.n_ctx = core.n_ctx
        self.token_bytes_max = self.wire.model.token_bytes_max
        self.text_bytes_max = core.text_bytes_max(config)
        self.n_slots = config.parallel
        self.core = core
        self.store = tiers.store
        self.checkpoint_tier = checkpoint_tier
        self._loop = asyncio.get_running_loop()
        self._generations: dict[Job, EmbeddedGeneration] = {}
        self._is_draining = False
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        drafts = open_drafts(self.wire.model, core, config, tiers.store)
        head = core.memory.head
        tiers.store.rows.head = None if head is None else head.digest
        try:
            self.parts = Parts(core, tiers, config, checkpoint_tier, drafts, self._deliver)
            self.budgets, self.media = self.parts.budgets, self.parts.media
            self._check_retention(config)
        except BaseException:
            if drafts is not None:  # before the caller frees the context and the model
                drafts.close()
            raise
        self.pool, self.scheduler = self.parts.pool, self.parts.scheduler
        self.calibrator = Calibrator(
            core,
            self.scheduler,
            tiers.store,
            tiers,
            rotation=self.parts.rotation,
            keys=self.parts.keys,
            transforms=config.transform_after_s >= 0,
            fidelity=config.fidelity,
            forced=config.level_formats is not None,
        )
        self.outgrowing: Collection[str] = {
            policy for policy in RETENTIONS if self.parts.hooks.of(LiveBudget(policy)).may_outgrow
        }
        self._config = config
        self.look_at_weights: Callable[[], None] = lambda: None
        """Voids all rows if the model's file has changed; set by who opens the engine."""
        self._text = ThreadPoolExecutor(2, "towerd-text")
        self._big_text = ThreadPoolExecutor(1, "towerd-big-text")

    def _check_retention(self, config: Config) -> None:
        """Raises ConfigError unless this model's chats can be kept within the budget set."""
        try:
            tokens = config.live_budget or self.n_ctx // 2
            self.budgets.check(LiveBudget(config.retention, tokens, config.retention_scope))
        except (InvalidRequest, NotSupported) as error:
            raise ConfigError(str(error)) from error

    @property
    def slot_image(self) -> ImageSpec | None:
        """See Engine.slot_image."""
        memory = self.core.memory
        if memory.kind is not DENSE:
            return None
        layout = memory.layout
        return ImageSpec(layout, layout.n_layer, 1, self.core.context.v_trans)

    @property
    def why_not_movable(self) -> str:
        """See Engine.why_not_movable."""
        if self._config.fidelity == "exact":
            return "--fidelity exact reuses only what prefill computes"
        if not self._config.cache_reuse:
            return "--cache-reuse 0 asks for none"
        return self.parts.rotation.why_not

    def start(self) -> None:
        """Start the inference thread, and the calibrator once it runs. Not on the event loop."""
        self.scheduler.start()
        self.calibrator.start()
        can_move = self._config.fidelity != "exact" and not self.core.why_not_movable
        if can_move and self._config.cache_reuse:
            self.store.index_runs()

    def generate(self, request: GenerateRequest) -> EmbeddedGeneration:
        if self._is_draining:
            raise Unavailable(CLOSING)
        ids = np.ascontiguousarray(request.ids, np.int32)
        if len(ids) == 0:
            raise InvalidRequest("The prompt has no tokens.")
        self.core.vocab.validate(ids[is_token(ids)])
        self.media.check(request, ids)
        self.budgets.check(request.live)
        if request.reuse_tokens_min is None:
            request = replace(request, reuse_tokens_min=self._config.cache_reuse)
        self.look_at_weights()  # before rows are chosen for it
        if len(ids) >= self.n_ctx and request.live.policy not in self.outgrowing:
            raise ContextExceeded.of_request(len(ids), self.n_ctx)
        adapted = self.core.adapters.adapted(request.scope)
        output = request.reply or self._reply(request)
        path = self.store.hold(ids, request.scope)
        job = Job(request, ids, len(ids), path, adapted=adapted, output=output, media=spans_of(ids))
        generation = self._generations[job] = EmbeddedGeneration(job, self.scheduler)
        self._all_ended.clear()
        try:
            self.scheduler.submit(job)
        except TowerdError:
            self._forget(job)
            raise
        return generation

    def _reply(self, request: GenerateRequest) -> Reply | None:
        """Make the reply of a request that no client made. Raises InvalidRequest."""
        if request.n_predict == 0:
            return None
        asked = {"prompt": request.ids, "n_predict": request.n_predict, **request.fields}
        return Reply(Request(self.wire.model, "completion", encode(asked)), 0)

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Ids:
        check_text(text, self.text_bytes_max)
        # A text of megabytes takes seconds: others must not wait for it.
        pool = self._text if len(text) <= _TEXT_CHARS_MAX else self._big_text
        return await self._loop.run_in_executor(
            pool, self.retokenizer.tokenize, text, add_special, parse_special
        )

    async def detokenize(self, ids: Sequence[int] | Ids) -> bytes:
        array = np.asarray(ids, np.int32)
        self.core.vocab.validate(array[is_token(array)])
        return await self._loop.run_in_executor(self._text, self.core.vocab.detokenize, array)

    async def end_reasoning(self, replies: Sequence[Reply]) -> bool:
        # Off the loop: a reply that is being sampled makes others wait.
        return await self.wire.call(0, _end_reasoning, replies)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        return [self.core.vocab.pieces[i] for i in ids]

    def slots(self) -> list[SlotView]:
        """A snapshot, read without the inference thread's help."""
        speculative = self.scheduler.speculator.is_on
        return [replace(view, speculative=speculative) for view in self.scheduler.slots.views()]

    async def running(self) -> list[SlotView]:
        return [view for view in self.slots() if view.is_processing]

    async def kept(self, ids: Ids, scope: str) -> Kept | None:
        found = self.scheduler.call(lambda: self.budgets.kept(ids, scope))
        return await asyncio.wrap_future(found)

    def stats(self) -> dict[str, Any]:
        scheduler = self.scheduler
        return {
            "live_cells": self.pool.n_cells,
            "live_cells_used": self.pool.cells_used,
            "live_sequences": len(self.pool),
            "running": sum(not job.request.background for job in list(scheduler.active)),
            "waiting": len(scheduler.waiting),
            "bytes_in": self.parts.restorer.bytes_in,
            "bytes_out": self.parts.exporter.bytes_out,
            "state_kind": self.core.memory.kind.name,
            "state_cut": self.core.memory.kind.cut,
            "busy_slots_per_decode": scheduler.counters["sequences_decoded"]
            / max(1, scheduler.counters["decode_steps"]),
            "exports": scheduler.room.n_exports,
            "tokens_moved": self.parts.moved.runs.n_moved,
            "tokens_move_checked": self.parts.moved.runs.n_checked,
            "tokens_move_refused": self.parts.moved.runs.n_refused,
            **self.budgets.stats(),
            **scheduler.speculator.stats(),
            **self.media.stats(),
            **({} if self.checkpoint_tier is None else self.checkpoint_tier.stats()),
            "tasks": scheduler.slots.n_tasks,
            **scheduler.counters,
            "preemptions": scheduler.room.n_preemptions,
            "decode_steps": scheduler.counters["decode_steps"]
            + (self._embedder.n_decodes if self._embedder is not None else 0),
        }

    def is_quiet(self) -> bool:
        """Whether it is idle or only decodes. May be called by any thread."""
        jobs = list(self.scheduler.active)
        return not self.scheduler.waiting and all(job.phase is JobPhase.DECODE for job in jobs)

    def is_busy(self) -> bool:
        """Whether requests run or wait. May be called by any thread."""
        return self.scheduler.is_busy

    async def settle(self) -> None:
        """Wait until every recorded row of an idle sequence has been exported."""
        await asyncio.wrap_future(self.scheduler.settled())

    def forget_live(self) -> None:
        """Drop the live rows of every chat without a running request. May be called by any
        thread."""

        def forget() -> None:
            for seq in [seq for seq in self.pool if not seq.busy]:
                self.pool.drop(seq)
            self.budgets.parked.clear()

        self.scheduler.call(forget)

    def give_back(self) -> None:
        """Have chats outside of the context give RAM back, soon. Any thread may call it."""
        parked = self.budgets.parked
        if len(parked):
            self.scheduler.call(parked.halve)

    async def drain(self, grace_s: float) -> None:
        for job in list(self._generations):
            if job.request.background:
                self.scheduler.cancel(job)
        try:
            await asyncio.wait_for(self._all_ended.wait(), grace_s)
        except TimeoutError:
            self._is_draining = True
            for job in list(self._generations):
                self.scheduler.cancel(job)
            await self._all_ended.wait()
        self._is_draining = True

    async def close(self) -> None:
        await asyncio.to_thread(self.calibrator.close)
        await asyncio.to_thread(self.wire.close)
        if self._embedder is not None:
            await asyncio.to_thread(self._embedder.close)
        await asyncio.to_thread(self.parts.close)
        self._text.shutdown()
        self._big_text.shutdown()

    def _deliver(self, events: list[tuple[Job, Any]]) -> None:
        """Hand events from the inference thread to the event loop, with one wake-up per step."""
        self._loop.call_soon_threadsafe(self._dispatch, events)
        if any(isinstance(event, Started) for _, event in events):
            time.sleep(_HEAD_START_S)

    def _dispatch(self, events: list[tuple[Job, Any]]) -> None:
        for job, event in events:
            generation = self._generations.get(job)
            if generation is None:
                continue
            generation.cut_off = job.cut_off
            generation.events.put_nowait(event)
            if isinstance(event, Finish | TowerdError):
                self._forget(job)

    def _forget(self, job: Job) -> None:
        del self._generations[job]
        if not self._generations:
            self._all_ended.set()


def _end_reasoning(replies: Sequence[Reply]) -> bool:
    """End the reasoning of all replies; whether any was reasoning."""
    return sum(reply.end_reasoning() for reply in replies) > 0
