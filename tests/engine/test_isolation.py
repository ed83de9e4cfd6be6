"""A failure of one chat, or of one client, does not affect the others."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from contextlib import aclosing, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from oracle import ask, check_integrity, settle, some_ids
from services import OpenService

from towerd.engine.base import Finish, GenerateRequest, LiveBudget, Piece
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.taps import Taps
from towerd.engine.embedded.engine import EmbeddedGeneration
from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.live.live_set import BoundedSet, Observed
from towerd.engine.embedded.live.parked import Parked, ParkedTowers
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.engine.embedded.longchat.budgets import Budgets
from towerd.engine.embedded.restore.branching import FoundLive
from towerd.engine.embedded.run.background import Inbox
from towerd.engine.live_index import LiveIndex
from towerd.engine.moving import rotation
from towerd.errors import TowerdError
from towerd.models.bundled import bundled_model
from towerd.retention import Positions
from towerd.slots.errors import StateError

LIVE = LiveBudget("streaming", 64)


def test_an_inbox_forgets_who_has_left() -> None:
    """A question that was taken back is not asked; others get their answer or its error."""
    inbox, ran = Inbox(), []
    gone, there = inbox.call(lambda: ran.append("gone")), inbox.call(lambda: 7)
    wrong = inbox.call(lambda: 1 // 0)
    assert gone.cancel()
    for _ in range(3):
        inbox.get()()
    assert ran == []
    assert there.result() == 7
    assert isinstance(wrong.exception(), ZeroDivisionError)


async def test_a_caller_that_leaves(service_on: OpenService) -> None:
    """Questions to the inference thread are given up before it comes to them; what runs continues,
    and other questions are answered."""
    async with service_on(bundled_model(), threads=1) as service:
        alone = await ask(service, some_ids(30), 12)
        engine, may_outgrow = service.engine, threading.Event()
        engine.scheduler.call(lambda: may_outgrow.wait(30))
        running = asyncio.create_task(ask(service, some_ids(30), 12, scope="other"))
        leaving = [
            asyncio.create_task(engine.kept(some_ids(30), "local")),
            asyncio.create_task(engine.settle()),
        ]
        staying = asyncio.create_task(engine.settle())
        await asyncio.sleep(0.05)
        for task in leaving:
            task.cancel()
        gone = await asyncio.gather(*leaving, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError | CancelledError) for each in gone)
        may_outgrow.set()
        assert (await running).ids == alone.ids
        await asyncio.wait_for(staying, 30)
        await check_integrity(service)


@pytest.mark.parametrize("error", [ValueError("no"), StateError("damaged"), TowerdError("full")])
async def test_an_eviction_that_fails(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It ends its own request; the one beside it says what it says alone."""
    async with service_on(bundled_model(), threads=1) as service:
        alone = await ask(service, some_ids(30), 40)
        keep = BoundedSet.drop

        def drop(self: BoundedSet, stay: Any) -> Any:
            if self.budget.tokens == 65:
                raise error
            return keep(self, stay)

        monkeypatch.setattr(BoundedSet, "drop", drop)
        results = await asyncio.gather(
            ask(service, some_ids(30), 40, scope="other"),
            ask(service, some_ids(30), 80, live=LiveBudget("streaming", 65), scope="bad"),
            ask(service, some_ids(30), 80, live=LIVE, scope="good"),
            return_exceptions=True,
        )
        beside, failed, good = results
        assert isinstance(failed, TowerdError)
        assert not isinstance(beside, BaseException)
        assert not isinstance(good, BaseException)
        assert beside.ids == alone.ids
        assert len(good.ids) == 80
        await settle(service)


async def test_attention_that_cannot_be_read(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs the chat that goes by it, not the one beside it."""
    async with service_on(bundled_model(), threads=1, retention="h2o") as service:
        alone = await ask(service, some_ids(30), 12)
        monkeypatch.setattr(Taps, "take", lambda *_: 1 // 0)
        beside, failed = await asyncio.gather(
            ask(service, some_ids(30), 12, scope="other"),
            ask(service, some_ids(30), 40, live=LiveBudget("h2o", 64), scope="bad"),
            return_exceptions=True,
        )
        assert isinstance(failed, TowerdError)
        assert not isinstance(beside, BaseException)
        assert beside.ids == alone.ids
        await settle(service)


async def test_a_chat_that_cannot_be_kept_in_ram(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells are free all the same, and its next turn evaluates it again."""
    fewer = {"live_sequences": 1, "parallel": 1, "threads": 1}
    async with service_on(bundled_model(), **fewer) as service:
        monkeypatch.setattr(Budgets, "leaving", lambda self, seq: 1 // 0)
        first = await ask(service, some_ids(120), 4, live=LIVE)
        other = await ask(service, some_ids(20, 1), 4)
        assert len(other.ids) == 4
        again = await ask(service, some_ids(120), 4, live=LIVE)
        assert again.ids == first.ids
        await settle(service)


async def test_a_background_prompt_that_gets_no_room(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is evicted for it, so it must not wait at the head of the queue."""
    async with service_on(bundled_model(), threads=1) as service:
        restorer = service.engine.parts.restorer
        begin = restorer.begin

        def no_room(job: Job, found: FoundLive, capacity: int, evict: Any) -> bool:
            return not job.request.background and begin(job, found, capacity, evict)

        monkeypatch.setattr(restorer, "begin", no_room)
        request = GenerateRequest(some_ids(40), n_predict=0, background=True)
        finish = await asyncio.wait_for(service.sessions.run_quietly(request), 30)
        assert finish is not None
        assert finish.n_cached == 0
        answer = await asyncio.wait_for(ask(service, some_ids(30), 4), 30)
        assert len(answer.ids) == 4


async def test_a_budget_where_rows_cannot_be_moved(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they can is asked once, not at every token; the chat ends where the context does."""
    n_read = 0

    def unknown(*_: Any) -> Any:
        nonlocal n_read
        n_read += 1
        raise StateError("it is not known how it rotates")

    monkeypatch.setattr(rotation, "rope_of", unknown)
    async with service_on(bundled_model(), threads=1, ctx_size=256) as service:
        answer = await ask(service, some_ids(100), 200, live=LIVE)
        assert len(answer.ids) == 156
        assert answer.finish.truncated
        assert n_read == 1


async def test_moving_a_chat_together_uses_up_its_queries(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are rotated to the places that tokens had before; keys are not any more."""
    live = LiveBudget("h2o", 90)
    settings = {"ctx_size": 256, "live_tokens": 256, "threads": 1, "retention": "h2o"}
    async with service_on(bundled_model(), **settings) as service:
        observer, events = service.engine.parts.observer, list[tuple[str, int, float]]()
        assert observer is not None
        measure, compacted = observer.measure, BoundedSet.compacted

        def measuring(seq: LiveSeq, live_set: BoundedSet) -> None:
            events.append(("measured", len(live_set.observed), 0.0))
            measure(seq, live_set)

        def moved(live_set: BoundedSet, places: Positions) -> None:
            events.append(("moved", len(live_set.observed), float(live_set.mass.sum())))
            compacted(live_set, places)

        monkeypatch.setattr(observer, "measure", measuring)
        monkeypatch.setattr(BoundedSet, "compacted", moved)
        await ask(service, some_ids(200), 200, live=live)
        moves = [pair for pair in pairwise(events) if pair[1][0] == "moved"]
        assert any(before[0] == "measured" and before[1] for before, _ in moves)
        assert all(move[1] == 0 and move[2] > 0 for _, move in moves)
        await settle(service)


async def test_a_chat_that_gives_way_while_its_prompt_is_evaluated(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the context, so that a part of it was evicted: it continues as it was, and what it had
    evaluated is not reported as found."""
    settings = {"threads": 1, "ctx_size": 128, "live_tokens": 256, "batch_size": 32}
    async with service_on(bundled_model(), **settings) as service:
        expected = await ask(service, some_ids(240), 8, live=LIVE, scope="undisturbed")
        scheduler, n_times = service.engine.scheduler, 0

        def preempt() -> None:
            nonlocal n_times
            partial = [j for j in scheduler.active if j.seq is not None and j.seq.is_partial]
            if any(j.phase is JobPhase.PREFILL for j in partial):
                scheduler.room.preempt()
                n_times += 1

        after_step = service.engine.budgets.after_step

        def then(job: Job) -> None:
            after_step(job)
            if n_times < 3:
                scheduler.call(preempt)  # before the next step

        monkeypatch.setattr(service.engine.budgets, "after_step", then)
        found = await ask(service, some_ids(240), 8, live=LIVE)
        assert n_times == 3
        assert found.ids == expected.ids
        assert (found.finish.reuse.live, found.finish.reuse.prefill) == (0, 240)
        assert found.finish.reuse.kept == expected.finish.reuse.kept
        await settle(service)


def test_parked_chats_are_weighed_with_all_they_hold() -> None:
    """Queries that were observed, and rows that the store has not got, are bytes too."""
    live_set = BoundedSet.whole(LIVE, 50, 512)
    queries = np.zeros((4, 8, 40, 64), np.float32)
    live_set.observe(Observed(10, queries), 64)
    ids = np.arange(50, dtype=np.int32)
    blob, provenance = np.zeros(1000, np.uint8), np.zeros(50, np.uint8)
    parked = Parked("local", None, ids, provenance, live_set, blob)
    assert parked.nbytes >= queries.nbytes + 1000
    index = LiveIndex[Parked]()
    towers = ParkedTowers(2 * parked.nbytes, index)
    for _ in range(5):
        towers.add(replace(parked))
    assert len(towers) == 2
    assert list(index) == list(towers)
    assert towers.nbytes == 2 * parked.nbytes


async def test_what_a_failed_request_said_is_kept(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens, in a session; its rows are evaluated again."""
    async with service_on(bundled_model(), threads=1) as service:
        decode, n_left = LlamaContext.decode, 6

        def failing(context: LlamaContext) -> None:
            nonlocal n_left
            n_left -= 1
            if n_left < 0:
                raise TowerdError("it is broken")
            decode(context)

        monkeypatch.setattr(LlamaContext, "decode", failing)
        said: list[int] = []
        request = GenerateRequest(ids=some_ids(30), n_predict=20)

        async def run() -> None:
            async for event in service.sessions.run(request):
                said.extend(event.ids if isinstance(event, Piece) else ())

        with pytest.raises(TowerdError):
            await run()
        assert said
        await service.sessions.drain()
        monkeypatch.undo()
        (session,) = service.store.sessions()
        kept = service.store.session_ids(session.id, "local").tolist()
        assert kept == [*some_ids(30).tolist(), *said]
        again = await ask(service, kept, 4)
        assert again.finish.reuse.prefill >= len(said)


@pytest.mark.parametrize("is_left", [False, True])
async def test_a_turn_is_told_although_its_request_is_not_released(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch, is_left: bool
) -> None:
    """Of one that was answered, and of one that was left: who waits for it does not wait for ever."""
    async with service_on(bundled_model(), threads=1) as service:
        release = EmbeddedGeneration.release

        def failing(generation: EmbeddedGeneration) -> None:
            release(generation)
            raise RuntimeError("it is broken")

        monkeypatch.setattr(EmbeddedGeneration, "release", failing)
        turn: asyncio.Future[Finish | None] = asyncio.get_running_loop().create_future()
        request = GenerateRequest(ids=some_ids(30), n_predict=400 if is_left else 4)
        async with aclosing(service.sessions.run(request, turn=turn)) as running:
            with nullcontext() if is_left else pytest.raises(RuntimeError):
                async for event in running:
                    if is_left and isinstance(event, Piece):
                        break
        await service.sessions.drain()
        assert turn.done()
        finish = turn.result()
        assert finish is not None
        assert [finish.session] == [each.id for each in service.store.sessions()]
