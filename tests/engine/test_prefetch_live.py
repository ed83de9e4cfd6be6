"""Prefetch on a real engine: the next agent of a workflow finds its prompt live, nobody waits for it, and
it takes nothing from anyone."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from oracle import Answer, Oracle, ask, check_answer, check_integrity, inside, settle, some_ids
from services import EmbeddedService, OpenService
from waiting import until_async

from towerd.models.bundled import bundled_model

SETTINGS: dict[str, Any] = {
    "policy": "pbkv",
    "anticipate": False,
    "live_tokens": 2048,
    "prefetch_bytes": 64 << 20,
}


class Loop:
    """Agents a, b, c in turn, each with its own growing chat."""

    def __init__(self, service: EmbeddedService, n: int = 150, workflow: str = "w") -> None:
        self.service = service
        self.workflow = workflow
        self.chats = {agent: some_ids(n, seed) for seed, agent in enumerate("abc")}

    async def step(self, agent: str, **fields: Any) -> Answer:
        """One step, recorded and told to the policies."""
        chat = self.chats[agent]
        names = {"workflow": self.workflow, "agent": agent, "session": self.workflow + agent}
        answer = await ask(self.service, chat, 4, **(names | fields))
        said = np.array(answer.ids, np.int32)
        self.chats[agent] = np.concatenate([chat, said, some_ids(5, len(chat))])
        await asyncio.to_thread(self.service.traffic.running, None)
        return answer

    async def rounds(self, agents: str) -> None:
        for agent in agents:
            await self.step(agent)
            await settle(self.service)


async def evict_all(service: EmbeddedService) -> None:
    while await inside(service, service.engine.scheduler.room.evict_one):
        pass


async def prefetched(service: EmbeddedService, more_than: int = 0) -> int:
    """The bytes prefetched once there are more, and the engine is idle."""
    seen = -1

    def is_done() -> bool:
        nonlocal seen
        before, seen = seen, service.tiers.stats()["prefetched_bytes"]
        return seen > more_than and seen == before and not service.engine.is_busy()

    await until_async(is_done)
    return seen


@pytest.mark.parametrize("is_there", [True, False])
async def test_the_next_agent_finds_its_prompt_live(
    service_on: OpenService, is_there: bool
) -> None:
    """Rows in the store are restored, those that are gone are evaluated; the answer is the same."""
    oracle = Oracle(bundled_model())
    async with service_on(bundled_model(), **SETTINGS) as service:
        loop = Loop(service)
        await loop.rounds("abcabc")
        await evict_all(service)
        n = service.tiers.stats()["prefetched_bytes"]
        used = service.tiers.stats()["prefetched_bytes_used"]
        if not is_there:
            (session,) = [s for s in service.store.sessions() if s.id == "wb"]
            ids = service.store.session_ids(session.id)
            for node in service.store.match(ids, "local").nodes:
                service.store.rows.drop_hot(node)
                if node.file is not None:
                    service.store.rows.drop_file(node.file)
        await loop.step("a")
        new = await prefetched(service, n) - n
        hot = service.tiers.stats()["hot_bytes"]
        await settle(service)
        prompt = loop.chats["b"]
        answer = await loop.step("b")
        assert answer.finish.reuse.live >= len(prompt) - 10
        assert answer.finish.reuse.hot == answer.finish.reuse.warm == 0
        check_answer(oracle, prompt, answer)
        assert is_there or hot <= service.tiers.stats()["hot_bytes"]
        stats = service.tiers.stats()
        assert stats["prefetched_bytes_used"] - used >= new > 0
        assert stats["prefetched_bytes_wasted"] == 0
        await settle(service)
    oracle.close()


async def test_nothing_leaves_for_it_but_what_is_over(service_on: OpenService) -> None:
    """Beside running workflows there is no room; when one of them ends, there is."""
    small = SETTINGS | {"live_tokens": 800, "live_sequences": 3, "parallel": 2}
    async with service_on(bundled_model(), **small) as service:
        loop, others = Loop(service), Loop(service, 200, "other")
        service.tiers.prefetcher.moved(
            "local", 1 << 30
        )  # so that what is evicted here does not stop it
        await loop.rounds("abcab")
        await evict_all(service)
        n = service.tiers.stats()["prefetched_bytes"]
        await others.rounds("b")
        await others.rounds("c")
        await loop.step("c")
        await settle(service)
        assert service.engine.stats()["live_sequences"] == 3
        assert service.tiers.stats()["prefetched_bytes"] == n
        await asyncio.to_thread(service.traffic.end, "local", "other")
        await loop.step("a")
        assert await prefetched(service, n) > n
        reuse = (await loop.step("b")).finish.reuse
        assert reuse.live > 150
        await settle(service)


async def test_it_gives_way_and_is_counted(service_on: OpenService) -> None:
    """A request of someone else ends it, and has its answer; the end of the workflow forgets it."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        loop = Loop(service, 400)
        await loop.rounds("abcabc")
        for node in service.store.nodes():
            if node.file is not None:
                service.store.rows.drop_hot(node)
                service.store.rows.drop_file(node.file)
        n = service.tiers.stats()["prefetched_bytes"]
        await loop.step("a")
        await until_async(lambda: service.tiers.stats()["prefetched_bytes"] > n)
        answer = await ask(service, some_ids(30, 77), 3)
        assert len(answer.ids) == 3
        assert answer.finish.reuse.live == 0
        await asyncio.to_thread(service.traffic.end, "local", "w")
        await until_async(lambda: service.tiers.stats()["prefetched_bytes_wasted"] > 0)
        await settle(service)
        stats = service.tiers.stats()
        used, wasted = stats["prefetched_bytes_used"], stats["prefetched_bytes_wasted"]
        assert stats["prefetched_bytes"] == used + wasted
        assert service.store.nodes()
        await check_integrity(service)


async def test_others_who_run_do_not_push_it_out(service_on: OpenService) -> None:
    """More idle cells than running requests tolerate stay for a step that is still to come."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        loop = Loop(service, 400)
        service.tiers.prefetcher.moved(
            "local", 1 << 30
        )  # so that what is evicted here does not stop it
        await loop.rounds("abcabc")
        await evict_all(service)
        n = service.tiers.stats()["prefetched_bytes"]
        await loop.step("a")
        await prefetched(service, n)
        await ask(service, some_ids(30, 77), 30)
        assert (await loop.step("b")).finish.reuse.live > 400
        await settle(service)


async def test_tenants_do_not_learn_from_each_other(service_on: OpenService) -> None:
    """Another tenant's workflow of the same name, with agents of the same names, brings nothing."""
    async with service_on(bundled_model(), **SETTINGS) as service:
        mine, theirs = Loop(service), Loop(service)
        theirs.chats = {agent: some_ids(120, 50 + i) for i, agent in enumerate("abc")}
        await mine.rounds("abcabc")
        await evict_all(service)
        n = service.tiers.stats()["prefetched_bytes"]
        for agent in "ac":
            await theirs.step(agent, scope="other")
            await settle(service)
        assert service.tiers.stats()["prefetched_bytes"] == n
        await mine.step("a")
        await prefetched(service, n)
        scopes = {seq.scope for seq in service.engine.pool if seq.prefetch is not None}
        assert scopes == {"local"}


async def test_a_switch_turns_it_off(service_on: OpenService) -> None:
    async with service_on(bundled_model(), **(SETTINGS | {"prefetch_bytes": 0})) as service:
        loop = Loop(service)
        await loop.rounds("abcabc")
        await evict_all(service)
        await loop.step("a")
        await settle(service)
        answer = await loop.step("b")
        assert answer.finish.reuse.live == 0
        assert answer.finish.reuse.hot > 100
        stats = service.tiers.stats()
        assert stats["prefetched_bytes"] == stats["prefetch_stopped"] == 0
