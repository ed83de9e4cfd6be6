"""Long random histories: hypothesis drives one small service; 200 chats thrash every tier."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Answer, Oracle, ask, check_answer, check_integrity, settle
from services import EmbeddedService, OpenService
from waiting import until_async

from towerd.models.bundled import bundled_model
from towerd.tokens import Ids

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["say", "edit", "regenerate", "new", "restart", "evict", "forget"]),
        st.integers(0, 2**16),
    ),
    min_size=3,
    max_size=10,
)


class Chats:
    """What the clients know: each chat is its full token history."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.base = self.tokens(40)
        self.histories: list[Ids] = []
        self.prompts: list[Ids] = []

    def tokens(self, n: int) -> Ids:
        return self.rng.integers(260, 500, n).astype(np.int32)

    def next_prompt(self, kind: str, pick: int) -> Ids | None:
        """The prompt of the next request, None when there is no chat to work on."""
        if kind == "new" or not self.histories:
            return np.concatenate([self.base, self.tokens(1 + pick % 30)])
        at = pick % len(self.histories)
        if kind == "say":
            return np.concatenate([self.histories[at], self.tokens(1 + pick % 20)])
        if kind == "regenerate":
            return self.prompts[at]
        cut = len(self.base) + pick % (len(self.histories[at]) - len(self.base))
        return np.concatenate([self.histories[at][:cut], self.tokens(3)])

    def heard(self, prompt: Ids, answer: Answer) -> None:
        self.prompts.append(prompt)
        self.histories.append(np.concatenate([prompt, np.array(answer.ids, np.int32)]))


async def _play(
    service_on: OpenService, model: Path, oracle: Oracle, steps: list[tuple[str, int]], seed: int
) -> None:
    chats, todo = Chats(seed), list(steps)
    while todo:
        async with service_on(model, live_sequences=4, parallel=2, live_tokens=1024) as service:
            while todo:
                kind, pick = todo.pop(0)
                if kind == "restart":
                    break
                await _step(service, chats, oracle, kind, pick)


async def _step(
    service: EmbeddedService, chats: Chats, oracle: Oracle, kind: str, pick: int
) -> None:
    if kind == "evict":
        await asyncio.wrap_future(
            service.engine.scheduler.call(service.engine.scheduler.room.evict_one)
        )
    elif kind == "forget":
        for node in service.store.nodes()[pick % 3 :: 3]:
            if node.file is not None:
                service.store.rows.drop_hot(node)
                service.store.rows.drop_file(node.file)
    else:
        prompt = chats.next_prompt(kind, pick)
        if prompt is not None and len(prompt) < 400:
            answer = await ask(service, prompt, 1 + pick % 9)
            check_answer(oracle, prompt, answer)
            chats.heard(prompt, answer)
    await settle(service)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=OPERATIONS, seed=st.integers(0, 999))
def test_any_history_equals_monolithic_prefill(
    service_on: OpenService,
    model_path: Path,
    oracle: Oracle,
    steps: list[tuple[str, int]],
    seed: int,
) -> None:
    """Whatever clients and tiers do, every answer is the one a fresh prefill gives."""
    asyncio.run(_play(service_on, model_path, oracle, steps, seed))


@pytest.mark.timeout(300)
async def test_two_hundred_chats_over_eight_sequences(service_on: OpenService) -> None:
    """200 interleaved chats with budgets so small that everything is demoted and promoted many
    times: no wrong token, no leaked cell."""
    model = bundled_model()
    oracle = Oracle(model)
    rng = np.random.default_rng(5)
    base = rng.integers(260, 500, 32).astype(np.int32)
    chats = [np.concatenate([base, rng.integers(260, 500, 8).astype(np.int32)]) for _ in range(200)]
    token_bytes = 5 * 2 * 32 * 2
    budgets = {
        "live_sequences": 8,
        "parallel": 8,
        "live_tokens": 768,
        "ctx_size": 256,
        "hot_bytes": 2000 * token_bytes,
        "warm_bytes": 120 * 45056,
    }
    async with service_on(model, **budgets) as service:
        gate = asyncio.Semaphore(16)

        async def turn(i: int, turn_no: int) -> None:
            async with gate:
                prompt = chats[i]
                answer = await ask(service, prompt, 6)
                if i % 20 == turn_no:
                    check_answer(oracle, prompt, answer)
                said = rng.integers(260, 500, 5).astype(np.int32)
                chats[i] = np.concatenate([prompt, np.array(answer.ids, np.int32), said])

        for turn_no in range(4):
            order = rng.permutation(len(chats))
            await asyncio.gather(*(turn(int(i), turn_no) for i in order))
            await check_integrity(service)
        await settle(service)
        # those of prompts that are evaluated ahead may outlast the last request
        await until_async(lambda: service.store.stats()["paths_held"] == 0)
        stats = service.tiers.stats()
        assert stats["hot_evictions"] > 200
        assert stats["warm_evictions"] > 20
        assert stats["segments_promoted"] > 0
        # what is fetched, or thawed, ahead of its next use goes over a budget for a moment
        await until_async(lambda: service.tiers.stats()["hot_bytes"] <= budgets["hot_bytes"])
        await until_async(lambda: service.tiers.stats()["warm_bytes"] <= budgets["warm_bytes"])
    oracle.close()
