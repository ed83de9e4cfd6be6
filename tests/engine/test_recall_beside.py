"""Beside the evaluation of a chat with a budget: which queries are tapped, when it is indexed, and
what becomes of it when that fails."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from oracle import ask, check_integrity, inside, job_for, live_sets, settle, some_ids
from services import EmbeddedService, OpenService

from towerd.engine.base import GenerateRequest, LiveBudget, Progress
from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.live.live_set import BoundedSet, Observed
from towerd.engine.embedded.longchat import recall
from towerd.engine.embedded.longchat.observer import QUERIES_MAX
from towerd.engine.embedded.longchat.recall import QUERY_TOKENS_MAX, Indexer
from towerd.errors import TowerdError
from towerd.models.bundled import bundled_model
from towerd.retention import can_recall
from towerd.retention.icecache import IceCache
from towerd.tokens import Ids

SETTINGS = {"threads": 1, "retention": "icecache"}


class Watched:
    """Which tokens' queries were taken, and which a decision could have asked for."""

    def __init__(self, service: EmbeddedService, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_batches = self.n_tapped = 0
        self.asked: list[tuple[list[int], list[int]]] = []
        """At each decision: the positions that were observed, and the last ones before it."""
        observer = service.engine.parts.observer
        assert observer is not None
        watch, measure, asking = observer.watch, observer.measure, observer.scaled_queries

        def watched(jobs: Any) -> None:
            jobs = list(jobs)
            watch(jobs)
            self.n_batches += 1
            self.n_tapped += any(n_wanted for _, n_wanted in jobs)

        def measured(seq: Any, live_set: BoundedSet) -> None:
            self._see(live_set, 0, QUERIES_MAX)
            measure(seq, live_set)

        def asked(live_set: BoundedSet, n_from: int) -> Any:
            self._see(live_set, n_from, QUERY_TOKENS_MAX)
            return asking(live_set, n_from)

        monkeypatch.setattr(observer, "watch", watched)
        monkeypatch.setattr(observer, "measure", measured)
        monkeypatch.setattr(observer, "scaled_queries", asked)

    def _see(self, live_set: BoundedSet, n_from: int, n_max: int) -> None:
        def span(each: Observed) -> range:
            return range(max(n_from, each.p0), each.p1)

        found = [p for each in live_set.observed for p in span(each)][-n_max:]
        n_before = getattr(self, "n_before", 0)
        self.n_before = live_set.n
        first = max(
            n_from, live_set.n - n_max, 0 if can_recall(live_set.budget.policy) else n_before
        )
        self.asked.append((found, list(range(first, live_set.n))))


@pytest.mark.parametrize("policy", ["snapkv", "icecache"])
async def test_only_queries_that_are_asked_for_are_tapped(
    service_on: OpenService, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the last queries decide, every decision has those of the last tokens before it, and most
    batches tap nothing. For the others every query counts (test_mass_live.py)."""
    live = LiveBudget(policy, 700)
    settings = {"threads": 1, "retention": policy, "ctx_size": 2048, "recall_every": 64}
    async with service_on(bundled_model(), **settings) as service:
        watched = Watched(service, monkeypatch)
        ids = some_ids(800)
        for turn in range(2):
            answer = await ask(service, ids, 150, live=live)
            ids = np.concatenate([ids, np.array(answer.ids, np.int32), some_ids(30, turn)])
        await check_integrity(service)
    assert len(watched.asked) >= 4
    for found, expected in watched.asked:
        assert found == expected
    share = watched.n_tapped / watched.n_batches
    assert 0 < share < (0.45 if can_recall(policy) else 0.9)


async def test_prompts_are_indexed_beside_their_evaluation(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a separate thread, while no other touches the index; the choices are those of an
    index that is brought up to date only when it is asked."""
    live = LiveBudget("icecache", 128)
    kept = []
    for is_beside in (True, False):
        async with service_on(
            bundled_model(),
            **SETTINGS,
            ctx_size=2048,
            warm_bytes=0,
            hot_bytes=0,
            recall_bytes=1 << 30,
        ) as service:
            if not is_beside:
                monkeypatch.setattr(Indexer, "beside", lambda *_: nullcontext())
            answer = await ask(service, some_ids(128 + 48 * 16), 40, live=live)
            stats = service.engine.stats()
            assert (stats["recall_index_beside_s"] > 0) == is_beside
            assert stats["recall_index_s"] >= stats["recall_index_beside_s"]
            (live_set,) = await inside(service, lambda: live_sets(service.engine))
            kept.append((live_set.kept.tolist(), answer.ids))
            await settle(service)
    assert kept[0] == kept[1]


async def test_a_chat_that_cannot_be_indexed(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends alone; another one beside it continues, and it can begin again."""
    live = LiveBudget("icecache", 128)
    index = IceCache.index
    broken: list[IceCache] = []

    def failing(self: IceCache, positions: Any, keys: Any, *, n_threads: int = 1) -> None:
        if threading.current_thread().name.startswith("towerd-index"):
            broken.append(self)
            if broken[0] is self:
                raise TowerdError("this index is full")
        index(self, positions, keys, n_threads=n_threads)

    settings = {**SETTINGS, "ctx_size": 1024, "batch_size": 128}
    async with service_on(bundled_model(), **settings) as service:
        alone = await ask(service, some_ids(500, 1), 20, live=live, scope="alone")
        monkeypatch.setattr(IceCache, "index", failing)
        answers = await asyncio.gather(
            ask(service, some_ids(500, 1), 20, live=live, scope="a"),
            ask(service, some_ids(500, 2), 20, live=live, scope="b"),
            return_exceptions=True,
        )
        failed = [each for each in answers if isinstance(each, BaseException)]
        assert len(failed) == 1
        assert "this index is full" in str(failed[0])
        await check_integrity(service)
        again = await ask(service, some_ids(500, 1), 20, live=live, scope="c")
        assert again.ids == alone.ids
        await settle(service)


async def test_a_cancelled_chat_leaves_no_index_behind(service_on: OpenService) -> None:
    """Cancelled while its prompt is evaluated; what is shut down meanwhile ends."""
    live = LiveBudget("icecache", 128)
    async with service_on(bundled_model(), **SETTINGS, ctx_size=2048) as service:
        for n_steps in (1, 4):
            request = GenerateRequest(
                ids=some_ids(1500, n_steps),
                fields={"temperature": 0},
                n_predict=10,
                live=live,
                return_progress=True,
            )
            generation = service.engine.generate(request)
            n_seen = 0
            async for event in generation:
                n_seen += isinstance(event, Progress)
                if n_seen > n_steps:
                    break
            await generation.cancel()
            generation.release()
            await check_integrity(service)
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("towerd-index") for name in names)


@pytest.mark.parametrize(("policy", "n"), [("streaming", 200), ("icecache", 70)])
async def test_a_prompt_beyond_its_budget_is_stored(
    service_on: OpenService, policy: str, n: int
) -> None:
    """A prompt longer than its budget is evaluated in full: its rows are what any prefill gives, and the
    store has them all."""
    ids = some_ids(n)
    async with service_on(bundled_model(), threads=1, retention=policy) as service:
        await ask(service, ids, 4, live=LiveBudget(policy, 64), session="long")
        await settle(service)
        whole = await ask(service, ids, 8)
        assert whole.finish.reuse.live == 0
        assert whole.finish.reuse.hot + whole.finish.reuse.warm == n - 1
        await settle(service)
        alone = await ask(service, ids, 8, scope="other")
        assert whole.ids == alone.ids


async def test_another_answer_in_a_chat_that_left_the_context(service_on: OpenService) -> None:
    """It continues from what is parked before the edit, and the parked chat stays as it was."""
    live = LiveBudget("streaming", 96)
    fewer = {"live_sequences": 1, "parallel": 1, "threads": 1, "ctx_size": 1024}
    async with service_on(bundled_model(), **fewer) as service:
        ids = some_ids(300)
        first = await ask(service, ids, 20, live=live)
        await ask(service, some_ids(50, 3), 2, live=live, scope="b")  # pushes it out
        assert service.engine.stats()["parked_sequences"] == 1
        edited = np.concatenate([ids, some_ids(12, 8)])
        changed = await ask(service, edited, 8, live=live)
        assert changed.finish.reuse.prefill <= 13
        await ask(service, some_ids(50, 3), 2, live=live, scope="b")
        longer = np.concatenate([ids, np.array(first.ids, np.int32), some_ids(5)])
        after = await ask(service, longer, 8, live=live)
        assert after.finish.reuse.prefill <= 6
        await settle(service)
    async with service_on(bundled_model(), threads=1, ctx_size=1024) as service:
        await ask(service, ids, 20, live=live)
        expected = await ask(service, edited, 8, live=live)
        assert changed.ids == expected.ids


@pytest.mark.parametrize("where", ["live", "parked"])
async def test_a_chat_does_not_wait_for_less_than_it_has(
    service_on: OpenService, where: str
) -> None:
    """While a prompt is evaluated that begins alike, a chat with a partial live set continues from
    its own rows."""
    live = LiveBudget("streaming", 96)
    settings = {"live_sequences": 1, "parallel": 1, "threads": 1, "ctx_size": 1024}
    async with service_on(bundled_model(), **settings) as service:
        ids = some_ids(300)
        answer = await ask(service, ids, 4, live=live)
        if where == "parked":
            await ask(service, some_ids(50, 3), 2, scope="b")
        longer = np.concatenate([ids, np.array(answer.ids, np.int32), some_ids(20, 5)])

        def is_waiting(with_ids: Ids, other_live: LiveBudget, mine: LiveBudget) -> bool:
            scheduler = service.engine.scheduler
            request = GenerateRequest(ids=longer, live=mine)
            other = GenerateRequest(ids=with_ids, live=other_live)
            running = job_for(other, phase=JobPhase.PREFILL)
            scheduler.active.append(running)
            try:
                job = job_for(request)
                restorer = service.engine.parts.restorer
                return restorer.is_coming(job, restorer.find(job), scheduler.active)
            finally:
                scheduler.active.remove(running)

        alike = np.concatenate([ids[:200], some_ids(90, 7)])
        assert not await inside(service, lambda: is_waiting(alike, live, live))
        assert await inside(
            service,
            lambda: is_waiting(longer, LiveBudget("streaming", 400), LiveBudget("streaming", 400)),
        )
        # Of a chat with another budget only the beginning can be shared.
        small = LiveBudget("streaming", 20)
        assert not await inside(service, lambda: is_waiting(longer, small, LiveBudget()))
        assert await inside(service, lambda: is_waiting(longer, LiveBudget(), LiveBudget()))


@pytest.mark.parametrize("policy", ["snapkv"])
async def test_stored_rows_do_not_change_what_is_kept(service_on: OpenService, policy: str) -> None:
    """The queries before the first eviction are there, though the store has the rows of those
    tokens: what stays is what stays where nothing is stored."""
    ids, live, kept = some_ids(300), LiveBudget(policy, 160), []
    for n_loaded in (0, 300 - QUERIES_MAX):
        async with service_on(bundled_model(), threads=1, retention=policy) as service:
            answer = await ask(service, ids, 4, live=live)
            assert answer.finish.reuse.hot + answer.finish.reuse.warm == n_loaded
            (live_set,) = await inside(service, lambda: live_sets(service.engine))
            kept.append((answer.ids, live_set.kept.tolist()))
            await settle(service)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("policy", ["snapkv"])
async def test_live_rows_do_not_change_what_is_kept(service_on: OpenService, policy: str) -> None:
    """Nor do rows of the same tokens that are live without a budget: no query was tapped of them,
    so the last ones before the first eviction are evaluated again."""
    ids, live, kept = some_ids(300), LiveBudget(policy, 160), []
    settings = {"threads": 1, "retention": policy, "warm_bytes": 0, "hot_bytes": 0}
    for is_live in (False, True):
        async with service_on(bundled_model(), **settings) as service:
            if is_live:
                await ask(service, ids, 1)
            answer = await ask(service, ids, 4, live=live)
            assert answer.finish.reuse.live == (300 - QUERIES_MAX) * is_live
            (live_set,) = await inside(service, lambda: live_sets(service.engine))
            kept.append((answer.ids, live_set.kept.tolist()))
            await settle(service)
            observer = service.engine.parts.observer
            assert observer is not None
            assert observer.taps.layers == ()  # what was read of the graph is not kept
    assert kept[0] == kept[1]


async def test_a_chat_that_gave_way_keeps_its_queries(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushed out of the context just before its first eviction, it decides by the same queries."""
    settings = {"threads": 1, "retention": "h2o", "warm_bytes": 0, "hot_bytes": 0}
    async with service_on(bundled_model(), **settings) as service:
        watched, scheduler = Watched(service, monkeypatch), service.engine.scheduler
        after_step = service.engine.budgets.after_step

        def then(job: Job) -> None:
            after_step(job)
            if job.n_live == 155 and not scheduler.room.n_preemptions:
                scheduler.call(scheduler.room.preempt)  # before the next step

        monkeypatch.setattr(service.engine.budgets, "after_step", then)
        await ask(service, some_ids(150), 20, live=LiveBudget("h2o", 160))
        assert scheduler.room.n_preemptions == 1
        await settle(service)
    assert watched.asked == [
        (list(range(160 - QUERIES_MAX, 160)), list(range(160 - QUERIES_MAX, 160)))
    ]


async def test_batches_that_would_be_computed_in_parts(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All queries that were asked for are there, for chats side by side too."""
    settings = {"threads": 1, "retention": "h2o", "batch_size": 512, "ubatch_size": 32}
    async with service_on(bundled_model(), **settings) as service:
        watched = Watched(service, monkeypatch)
        await asyncio.gather(
            *(ask(service, some_ids(170, i), 2, live=LiveBudget("h2o", 160)) for i in range(2))
        )
    assert [found for found, _ in watched.asked] == [list(range(170 - QUERIES_MAX, 170))] * 2


@pytest.mark.parametrize("where", ["live", "whole", "parked"])
async def test_a_broken_index_is_not_used_again(service_on: OpenService, where: str) -> None:
    """A request that ended before it was told leaves a chat that is evaluated again, not one that
    fails whenever it is continued."""
    settings = {"live_sequences": 1, "parallel": 1} if where == "parked" else {}
    live = LiveBudget("icecache", 128)
    async with service_on(bundled_model(), **SETTINGS, ctx_size=1024, **settings) as service:
        ids = some_ids(90 if where == "whole" else 300)
        await ask(service, ids, 4, live=live)
        (live_set,) = await inside(service, lambda: live_sets(service.engine))
        assert live_set.is_partial == (where != "whole")
        live_set.failure = TowerdError("this index is full")
        if where == "parked":
            await ask(service, some_ids(50, 3), 2, scope="b")  # pushes it out
            assert service.engine.stats()["parked_sequences"] == 0
        for seed in (4, 5):
            edited = np.concatenate([ids, some_ids(60, seed)])
            answer = await ask(service, edited, 4, live=live)
            assert len(answer.ids) == 4
        await settle(service)


def test_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation continues, and the chats are not touched after it."""
    done: list[int] = []
    is_free = threading.Event()

    class Threads(ThreadPoolExecutor):
        """One thread that waits before it works; a second task is one too many."""

        def submit(self, work: Any, *args: Any) -> Any:  # type: ignore[override]
            if args[1] == 1:
                raise RuntimeError("can't start new thread")

            def late() -> float:
                is_free.wait()
                done.append(args[1])
                return float(work(*args))

            return super().submit(late)

    monkeypatch.setattr(recall, "ThreadPoolExecutor", Threads)
    indexer, budget = Indexer(4, 1), LiveBudget("icecache", 64)
    chats = [(BoundedSet.whole(budget, 0, 512), i) for i in range(2)]
    with indexer.beside(chats):
        assert done == []
        is_free.set()
    assert done == [0]
    assert all(live_set.failure is None for live_set, _ in chats)
    indexer.close()


async def test_chats_that_do_not_run_share_their_ram(service_on: OpenService) -> None:
    """However many of them are live or parked, and all continue, those that were dropped from the store."""
    settings = {"threads": 1, "retention": "icecache", "recall_disk_bytes": 0, "live_tokens": 4096}
    live = LiveBudget("icecache", 64)
    async with service_on(bundled_model(), **settings) as service:
        engine, ids = service.engine, some_ids(200)
        await ask(service, ids, 20, live=live, scope="s0")
        (first,) = await inside(service, lambda: live_sets(engine))
        n_of_one = first.n_bytes_offloaded
        engine.budgets.parked.bytes_max = n_max = 3 * n_of_one
        for i in range(1, 7):
            await ask(service, ids, 20, live=live, scope=f"s{i}")
            await settle(service)
            sets = await inside(service, lambda: live_sets(engine))
            idle = sum(each.n_bytes_offloaded for each in sets) - n_of_one
            assert engine.budgets.parked.nbytes + idle <= n_max
        for i in range(7):
            assert len((await ask(service, ids, 20, live=live, scope=f"s{i}")).ids) == 20
        await check_integrity(service)
