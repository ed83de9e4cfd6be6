"""Conversations: every request is recorded durably before its last event reaches the client.

A session is recognised by its tokens (or named by X-Towerd-Session): the store finds the deepest
finished turn that the prompt continues. Edits and regenerations branch the trie.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import numpy as np

from towerd.anticipate import Anticipator
from towerd.cold.keeper import Keeper
from towerd.engine.base import (
    TURN_STOPS,
    Engine,
    Event,
    Finish,
    GenerateRequest,
    Generation,
    Ids,
)
from towerd.errors import TowerdError
from towerd.store import Store
from towerd.store.turn import Turn, TurnResult
from towerd.traffic import Traffic

log = logging.getLogger(__name__)


class Sessions:
    """Runs requests on an engine and records them in the store."""

    def __init__(self, engine: Engine, store: Store, traffic: Traffic | None = None) -> None:
        self.engine = engine
        self.store = store
        self.traffic = traffic
        self.anticipator: Anticipator | None = None
        self.cold: Keeper | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """The events of one request; closing the iterator early cancels it.

        What was generated until then is kept. The Finish event is yielded only after the turn
        is durable. Raises what `Engine.generate` raises, and DiskFull."""
        started_s = time.time()
        if self.anticipator is not None:
            self.anticipator.asked(request)
        use = self.cold.enter(request) if self.cold is not None else None
        generation: Generation | None = None
        record: asyncio.Future[Finish] | None = None
        session = request.session
        try:
            if use is not None:
                async for progress in use.thawing():
                    yield progress
                session = use.session
            generation = self.engine.generate(request)
            async for event in generation:
                if use is not None:
                    event = use.stamp(event)
                if isinstance(event, Finish):
                    record = asyncio.ensure_future(self._record(request, event, started_s, session))
                    event = await asyncio.shield(record)
                yield event
        finally:
            # Awaiting here would tie the clean-up to a task that is being cancelled.
            if generation is None:
                self._leave(request, None)
            elif record is None:
                self._later(self._abandon(request, generation, started_s, session))
            elif not record.done():  # what is released before it is stored is not kept
                self._later(self._release(request, record, generation))
            else:
                self._leave(request, generation)
                if self.anticipator is not None and not _failed(record):
                    self.anticipator.answered(request, record.result())

    async def run_quietly(self, request: GenerateRequest) -> Finish | None:
        """Run a request that nobody listens to; None if it ended without a Finish."""
        finish: Finish | None = None
        async for event in self.run(request):
            if isinstance(event, Finish):
                finish = event
        return finish

    async def drain(self) -> None:
        """Wait for the recording of requests whose clients left."""
        while self._closing:
            await asyncio.wait(self._closing)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _leave(self, request: GenerateRequest, run: Generation | None) -> None:
        """A request is over and recorded, or never ran."""
        if run is not None:
            run.release()
        if self.cold is not None:
            self.cold.leave(request)

    async def _release(
        self, request: GenerateRequest, record: asyncio.Future[Finish], run: Generation
    ) -> None:
        try:
            await record
        except TowerdError as error:
            log.error("a turn was not recorded", extra={"error": str(error)})
        finally:
            self._leave(request, run)

    async def _abandon(
        self, request: GenerateRequest, run: Generation, started_s: float, session: str | None
    ) -> None:
        try:
            finish = await run.cancel()
            if finish is not None:
                await self._record(request, finish, started_s, session)
        except TowerdError as error:
            log.error("an abandoned turn was not recorded", extra={"error": str(error)})
        finally:
            self._leave(request, run)

    async def _record(
        self, request: GenerateRequest, finish: Finish, started_s: float, session: str | None
    ) -> Finish:
        """Commit the turn; a prompt that got no answer is kept as reusable tokens only."""
        ids = np.asarray(request.ids, np.int32)
        if request.precache is not None or not finish.ids:
            # Of a prompt that was shortened, only the beginning has rows to be used again.
            n = finish.n_cached if finish.n_rows is None else min(finish.n_cached, finish.n_rows)
            if n:
                await asyncio.to_thread(self._insert, ids[:n], request.scope, started_s)
            return finish
        turn = Turn(
            scope=request.scope,
            session=session,
            prompt=ids,
            reply=np.array(finish.ids, np.int32),
            n_cached=finish.n_cached,
            started_s=started_s,
            finished=finish.stop != "cancelled",
            stop=TURN_STOPS[finish.stop],
            workflow=request.workflow,
            agent=request.agent,
            n_rows=finish.n_rows,
        )
        result = await asyncio.to_thread(self._commit, turn)
        return dataclasses.replace(finish, session=result.session_id)

    def _commit(self, turn: Turn) -> TurnResult:
        result = self.store.commit_turn(turn)
        if self.traffic is not None:
            self.traffic.recorded(turn, result.node, result.session_id)
        return result

    def _insert(self, ids: Ids, scope: str, started_s: float) -> None:
        tip = self.store.insert(ids, scope, [len(ids)])[-1]
        if self.traffic is not None:
            self.traffic.kept(tip, started_s)


def _failed(record: asyncio.Future[Finish]) -> bool:
    return record.cancelled() or record.exception() is not None
