"""Conversations: every request is recorded durably before its last event reaches the client.

A session is recognised by its tokens (or named by X-Towerd-Session): the store finds the deepest
finished turn that the prompt continues. Edits and regenerations branch the tree.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from towerd.cold.cold_tier import ColdTier, RequestGuard
from towerd.engine.base import (
    TURN_STOPS,
    Engine,
    Event,
    Finish,
    GenerateRequest,
    Generation,
    Started,
)
from towerd.errors import TowerdError
from towerd.sessions.anticipation import Anticipator
from towerd.sessions.recorder import TurnRecorder
from towerd.sessions.reevaluation import Reevaluator
from towerd.store.sessions.deletions import DeletionWatch
from towerd.store.sessions.media import SentMedium, medium_key
from towerd.store.sessions.turn import Turn
from towerd.tiers.manager import Tiers

if TYPE_CHECKING:  # it takes packages that only a shared tier needs
    from towerd.tiers.shared.fetcher import Fetcher
    from towerd.wire import Medium

log = logging.getLogger(__name__)


class Ending(enum.Enum):
    """How far a request came before it ended."""

    NOT_RUN = "it never reached the engine"
    CUT_OFF = "its client left, or the engine failed, before the last token"
    LEFT_EARLY = "its client left while its turn was being recorded"
    UNRECORDED = "its turn could not be recorded"
    RECORDED = "its turn is durable"


@dataclass(slots=True)
class RequestRun:
    """The state of one request while it runs on an engine and is recorded in the store."""

    request: GenerateRequest
    use: RequestGuard | None
    """Its use of the cold tier, which thaws the session that it continues."""
    started_s: float
    since: DeletionWatch
    """What is deleted while it runs."""
    turn: asyncio.Future[Finish | None] | None = None
    """See `Sessions.run`."""
    generation: Generation | None = None
    recording: asyncio.Future[Finish] | None = None

    @property
    def ending(self) -> Ending:
        """How far the request came. Valid once its iteration of events has ended."""
        if self.generation is None:
            return Ending.NOT_RUN
        if self.recording is None:
            return Ending.CUT_OFF
        if not self.recording.done():
            return Ending.LEFT_EARLY
        failed = self.recording.cancelled() or self.recording.exception() is not None
        return Ending.UNRECORDED if failed else Ending.RECORDED

    def settle(self, finish: Finish | None) -> None:
        """Tell what was recorded of it; only the first call counts."""
        if self.turn is not None and not self.turn.done():
            self.turn.set_result(finish)


class Sessions:
    """Runs requests on an engine and records them in the store."""

    def __init__(
        self,
        engine: Engine,
        recorder: TurnRecorder,
        moved_in: Tiers | None = None,
        cold: ColdTier | None = None,
        *,
        anticipate_tokens_max: int = 0,
        fetcher: Fetcher | None = None,
    ) -> None:
        """moved_in: the tiers whose moved rows are made exact in idle time; None: they stay. cold: thaws the sessions that requests continue. anticipate_tokens_max: maximum number
        of tokens of a chat's next prompt that are evaluated ahead; 0: none. fetcher: looks prompts up in the shared tier."""
        self.recorder = recorder
        self._engine = engine
        self._cold = cold
        self._fetcher = fetcher
        self._anticipator: Anticipator | None = None
        if anticipate_tokens_max:
            self._anticipator = Anticipator(
                engine, self.run_quietly, tokens_max=anticipate_tokens_max
            )
        self._reevaluator = None if moved_in is None else Reevaluator(self.run_quietly, moved_in)
        self._closing: set[asyncio.Task[None]] = set()

    async def run(
        self,
        request: GenerateRequest,
        since: DeletionWatch | None = None,
        turn: asyncio.Future[Finish | None] | None = None,
    ) -> AsyncGenerator[Event]:
        """The events of one request; closing the iterator early cancels it. since: what was deleted
        before, for a request that began earlier, or evaluates an earlier one again; None: from now on.
        turn: gets the Finish once it is recorded, also if the iterator was closed before; None if nothing was.

        Tokens generated until then are kept. The Finish event is yielded only after the turn is
        durable. Raises what `Engine.generate` raises, and DiskFull."""
        since = self.recorder.watch_deletions() if since is None else since
        run = RequestRun(request, None, time.time(), since, turn)
        try:
            await self.recorder.check_room()
            use = run.use = self._cold.enter(request) if self._cold is not None else None
            if self._anticipator is not None:
                self._anticipator.asked(request)
            if self._fetcher is not None and request.cache_prompt and not request.background:
                ids = np.asarray(request.ids, np.int32)
                await self._fetcher.before(ids, request.scope, since)
            run.generation = self._engine.generate(request)
            async for event in run.generation:
                if isinstance(event, Finish):
                    if self._fetcher is not None:
                        timings = event.timings
                        self._fetcher.evaluated(timings.prompt_n, timings.prompt_ms / 1e3)
                        live = np.concatenate((request.ids, np.asarray(event.ids, np.int32)))
                        self._fetcher.has_run(live[: event.n_cached], request.scope)
                    run.recording = asyncio.ensure_future(self._record(run, event))
                    event = await asyncio.shield(run.recording)
                elif isinstance(event, Started) and use is not None:
                    await use.thawed()
                    event = dataclasses.replace(event, reuse=use.reuse(event.reuse))
                yield event
        finally:
            self._end(run)

    async def run_quietly(
        self, request: GenerateRequest, since: DeletionWatch | None = None
    ) -> Finish | None:
        """Run a request without a client, as `run`. Returns its Finish, or None if it ended without
        one."""
        finish: Finish | None = None
        async for event in self.run(request, since):
            if isinstance(event, Finish):
                finish = event
        return finish

    async def stop_anticipating(self) -> None:
        """Cancel what is evaluated in idle time, and wait until it has ended."""
        if self._anticipator is not None:
            await self._anticipator.close()
        if self._reevaluator is not None:
            await self._reevaluator.close()

    def stats(self) -> dict[str, Any]:
        """Counters of what is evaluated in idle time."""
        found = {} if self._anticipator is None else self._anticipator.stats()
        return found | ({} if self._reevaluator is None else self._reevaluator.stats())

    async def drain(self) -> None:
        """Wait for the recording of requests whose clients left, and for `see_through`."""
        while self._closing:
            await asyncio.wait(self._closing)

    def see_through(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task of its own that `drain` waits for."""
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _end(self, run: RequestRun) -> None:
        """Finish a request. Work that remains runs in a task of its own: the current task may be
        in the middle of its cancellation."""
        match run.ending:
            case Ending.NOT_RUN | Ending.UNRECORDED:
                self._leave(run)
            case Ending.CUT_OFF:
                self.see_through(self._record_cut_off(run))
            case Ending.LEFT_EARLY:
                self.see_through(self._leave_recorded(run))
            case Ending.RECORDED:
                assert run.recording is not None
                finish = run.recording.result()
                run.settle(finish)
                self._leave(run)
                self._answered(run, finish)

    def _answered(self, run: RequestRun, finish: Finish) -> None:
        """Tell of a recorded turn, and begin what is done in idle time."""
        run.settle(finish)
        if self._anticipator is not None:
            self._anticipator.answered(run.request, finish)
        if self._reevaluator is not None:
            self._reevaluator.answered(run.request, finish, run.since)

    def _leave(self, run: RequestRun) -> None:
        """Release what the request held, and tell that nothing of it was recorded if nothing was told before: each
        also if the others fail. Rows that are not recorded by then are not kept."""
        with ExitStack() as ending:  # the last one is called first
            ending.callback(run.settle, None)
            if run.use is not None:
                ending.callback(run.use.leave)
            if run.generation is not None:
                ending.callback(run.generation.release)

    async def _record_cut_off(self, run: RequestRun) -> None:
        """Cancel the request and record what was generated."""
        assert run.generation is not None
        try:
            finish = await run.generation.cancel()
            if finish is not None:
                self._answered(run, await self._record(run, finish))
        except TowerdError as error:
            log.error("an abandoned turn was not recorded", extra={"error": str(error)})
        finally:
            self._leave(run)

    async def _leave_recorded(self, run: RequestRun) -> None:
        assert run.recording is not None
        try:
            self._answered(run, await run.recording)
        except TowerdError as error:
            log.error("a turn was not recorded", extra={"error": str(error)})
        finally:
            self._leave(run)

    async def _record(self, run: RequestRun, finish: Finish) -> Finish:
        """Commit the turn; a prompt without an answer is only kept as reusable tokens."""
        request, session = run.request, run.request.session
        if request.prefetch is not None:
            return finish  # it is recorded already
        if run.use is not None:  # the turn continues the one that is being thawed
            await run.use.thawed()
            session = run.use.session
            finish = dataclasses.replace(finish, reuse=run.use.reuse(finish.reuse))
        answered = request.precache is None and len(finish.ids) > 0
        n_cached = finish.n_cached
        if not answered and finish.n_rows is not None:
            # Only the beginning of a shortened prompt has reusable rows.
            n_cached = min(n_cached, finish.n_rows)
        sent: Sequence[SentMedium] = ()
        if answered and request.media and request.keeps_media:
            sent = await asyncio.to_thread(_sent, request.media)
        turn = Turn(
            scope=request.scope,
            session=session,
            prompt=np.asarray(request.ids, np.int32),
            reply=np.array(finish.ids, np.int32),
            n_cached=n_cached,
            started_s=run.started_s,
            finished=finish.stop != "cancelled",
            stop=TURN_STOPS[finish.stop],
            workflow=request.workflow,
            agent=request.agent,
            n_rows=finish.n_rows,
            since=run.since,
            media=sent,
        )
        recorded = await self.recorder.record(turn, answered=answered)
        return dataclasses.replace(finish, session=recorded) if answered else finish


def _sent(media: Sequence[Medium]) -> list[SentMedium]:
    """What a client sent for the media of its request."""
    files = {each.file_id: each.file for each in {each.file_id: each for each in media}.values()}
    return [
        SentMedium(medium_key(each.ids), file, each.ordinal)
        for each in media
        if (file := files[each.file_id]) is not None
    ]
