"""Sequences leave the live context by the policy of the other tiers, over the same tree."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from oracle import ask, check_integrity, inside, settle, some_ids
from services import EmbeddedService, OpenService
from waiting import until_async

from towerd.models.bundled import bundled_model
from towerd.tokens import Ids


async def step(service: EmbeddedService, ids: Ids, workflow: str, agent: str) -> Ids:
    """One step of a workflow; the tokens that its sequence has."""
    answer = await ask(service, ids, 4, workflow=workflow, agent=agent, session=workflow + agent)
    await settle(service)
    service.traffic.running(None)  # the policies have heard of the step
    return np.append(ids, answer.ids[:-1]).astype(np.int32)


async def is_live(service: EmbeddedService, ids: Ids) -> bool:
    """Whether a sequence has all these tokens."""
    found = await inside(
        service, lambda: service.engine.pool.index.longest(ids, "local", lambda _: True)
    )
    return found.n == len(ids)


@pytest.mark.parametrize("policy", ["foresight", "pbkv", "lru"])
async def test_what_is_over_leaves_first(service_on: OpenService, policy: str) -> None:
    """A workflow that has ended was used last; only LRU keeps it and drops one that runs."""
    async with service_on(bundled_model(), policy=policy) as service:
        runs = await step(service, some_ids(60, 1), "runs", "a")
        ended = await step(service, some_ids(60, 2), "ended", "a")
        await asyncio.to_thread(service.traffic.end, "local", "ended")
        assert await inside(service, service.engine.scheduler.room.evict_one)
        assert await is_live(service, runs) == (policy != "lru")
        assert await is_live(service, ended) == (policy == "lru")
        assert service.tiers.ranking.ranks_live == (policy != "lru")
        await check_integrity(service)


async def test_what_workflows_share_stays_until_the_last(service_on: OpenService) -> None:
    """A base of two workflows is not over with the first of them."""
    base = some_ids(50, 3)
    async with service_on(bundled_model()) as service:
        await ask(service, base, 1, workflow="one", agent="a")
        await settle(service)
        first = await step(service, np.append(base, some_ids(20, 4)).astype(np.int32), "one", "a")
        other = await step(service, np.append(base, some_ids(20, 5)).astype(np.int32), "two", "a")
        await asyncio.to_thread(service.traffic.end, "local", "one")
        await inside(service, service.engine.scheduler.room.evict_one)
        assert not await is_live(service, first)
        assert await is_live(service, other)
        assert await is_live(service, base)
        await check_integrity(service)


async def test_what_leaves_is_forgotten(service_on: OpenService) -> None:
    """The policy knows what is live and no more, through turns, edits, eviction and loss."""
    async with service_on(bundled_model(), live_sequences=4) as service:
        scheduler = service.engine.scheduler
        chat = await step(service, some_ids(80, 6), "w", "a")
        longer = await step(service, np.append(chat, some_ids(9, 7)).astype(np.int32), "w", "a")
        await step(service, np.append(longer[:70], some_ids(30, 8)).astype(np.int32), "w", "b")
        for seed in range(6):
            await step(service, some_ids(40, 20 + seed), f"w{seed}", "a")
        await until_async(lambda: len(service.tiers.ranking.live_standings) == 4)
        while await inside(service, scheduler.room.evict_one):
            await check_integrity(service)
        await asyncio.to_thread(service.tiers.ranking.settle)
        assert service.tiers.ranking.live_standings == {}
        assert await is_live(service, np.zeros(0, np.int32))
        again = await ask(service, np.append(longer, some_ids(3, 9)).astype(np.int32), 2)
        assert again.finish.reuse.hot == len(longer)


async def test_it_waits_for_no_policy(service_on: OpenService) -> None:
    """Sequences leave while another thread holds the lock of the ranking for as long as it likes."""
    async with service_on(bundled_model()) as service:
        await step(service, some_ids(60, 1), "runs", "a")
        ended = await step(service, some_ids(60, 2), "ended", "a")
        await asyncio.to_thread(service.traffic.end, "local", "ended")
        leave = service.engine.scheduler.room.evict_one

        def while_it_is_held(key: int) -> bool:
            assert service.engine.scheduler.call(leave).result(30)
            return False

        await asyncio.to_thread(service.tiers.ranking.hot_victims, 1, while_it_is_held)
        assert not await is_live(service, ended)
