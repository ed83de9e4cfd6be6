"""Chats with and without a budget, mixed at random: turns, edits, other answers, clients that
leave, little room, a restart. Who has no budget gets what monolithic prefill gives."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from oracle import GREEDY, Answer, Oracle, ask, settle, some_ids
from services import EmbeddedService, OpenService

from towerd.engine.base import GenerateRequest, LiveBudget
from towerd.engine.embedded.live.job import JobPhase
from towerd.models.bundled import bundled_model

LIVES = (
    LiveBudget(),
    LiveBudget(),
    LiveBudget("shift"),
    LiveBudget("streaming", 48),
    LiveBudget("streaming", 80),
    LiveBudget("h2o", 64),
    LiveBudget("icecache", 96),
)
N_CHATS = 4
PROMPT_MAX = 270
BOUND = 0.1
"""Of a log-probability: far above rounding, far below what a missing token does."""


@pytest.fixture(scope="module")
def fresh() -> Iterator[Oracle]:
    made = Oracle(bundled_model())
    yield made
    made.close()


class Mix:
    """What a few people do, told by a seed."""

    def __init__(self, oracle: Oracle, seed: int) -> None:
        self.chance = random.Random(seed)
        base = self.words(30)
        self.chats = [base + self.words(10) for _ in range(N_CHATS)]
        self.n_checked = 0
        self._oracle = oracle

    def words(self, n: int) -> list[int]:
        return [self.chance.randrange(260, 500) for _ in range(n)]

    def check(self, prompt: list[int], answer: Answer) -> None:
        """Every token's probability is that of a prefill of all before it."""
        ids = np.array(prompt + answer.ids[:-1], np.int32)
        rows = self._oracle.logprobs(ids, len(prompt) - 1)
        for row, probs, token in zip(rows, answer.probs, answer.ids, strict=True):
            assert abs(probs.logprob - row[token]) < BOUND
        self.n_checked += 1

    def prompt(self, i: int) -> list[int]:
        """A chat's next one: more of it, another answer, or an edit."""
        prompt, draw = list(self.chats[i]), self.chance.random()
        if draw < 0.2 and len(prompt) > 60:
            prompt = prompt[: self.chance.randrange(40, len(prompt))] + self.words(9)
        elif draw < 0.8:
            prompt += self.words(self.chance.randrange(5, 40))
        if len(prompt) > PROMPT_MAX:
            prompt = prompt[: self.chance.randrange(45, 120)] + self.words(5)
        return prompt

    async def turn(self, service: EmbeddedService, i: int) -> None:
        live, prompt = self.chance.choice(LIVES), self.prompt(i)
        if self.chance.random() < 0.15:
            await leave_early(service, prompt, live, self.chance.randrange(1, 6))
            return
        session = f"chat {i}" if self.chance.random() < 0.5 else None
        n = self.chance.randrange(2, 30)
        answer = await ask(service, prompt, n, live=live, session=session)
        if not live.is_bounded:
            self.check(prompt, answer)
        self.chats[i] = prompt + answer.ids


async def leave_early(
    service: EmbeddedService, ids: list[int], live: LiveBudget, n_events: int
) -> None:
    """Hear some events, then leave in the middle of the prompt or the answer."""
    request = GenerateRequest(np.array(ids, np.int32), fields=GREEDY, n_predict=40, live=live)
    run: Any = service.sessions.run(request)
    try:
        async for _ in run:
            n_events -= 1
            if n_events <= 0:
                break
    finally:
        await run.aclose()


@pytest.mark.parametrize("seed", range(int(os.environ.get("TOWERD_TEST_MIXES", "2"))))
async def test_who_has_no_budget_notices_nothing(
    service_on: OpenService, fresh: Oracle, seed: int
) -> None:
    mix = Mix(fresh, seed)
    settings: dict[str, Any] = {
        "ctx_size": 320,
        "live_tokens": mix.chance.choice([320, 512, 1024]),
        "live_sequences": mix.chance.choice([2, 3, 8]),
        "parallel": 2,
        "threads": 1,
        "fidelity": "exact",
        "retention": "h2o",
        "anticipate": bool(seed % 2),
        "hot_bytes": mix.chance.choice([1 << 20, 8 << 20, 1 << 28]),
        "recall_bytes": mix.chance.choice([1 << 17, 1 << 20, 1 << 25]),
    }
    for _ in range(2):
        async with service_on(bundled_model(), **settings) as service:
            for _ in range(10):
                some = mix.chance.sample(range(N_CHATS), mix.chance.choice([1, 2, 3]))
                await asyncio.gather(*(mix.turn(service, i) for i in some))
            await settle(service)
            for chat in mix.chats:  # and what the store has of all of them is exact
                prompt = [*chat[:PROMPT_MAX], 300]
                mix.check(prompt, await ask(service, prompt, 3))
            await settle(service)
    assert mix.n_checked > 5


@pytest.mark.parametrize("policy", ["h2o", "icecache"])
async def test_what_is_shared_is_given_up_for_rows_of_its_own(
    service_on: OpenService, policy: str
) -> None:
    """A chat that shares most of its cells with a running one needs others when it is thinned: where there are
    none, one of the two waits, and both come to their end."""
    live, prompt = LiveBudget(policy, 300, "layer"), some_ids(250)
    settings = {"ctx_size": 512, "live_tokens": 512, "parallel": 2, "threads": 1}
    async with service_on(bundled_model(), **settings, retention=policy) as service:
        first = asyncio.create_task(ask(service, prompt, 200))
        while not any(job.phase is JobPhase.DECODE for job in service.engine.scheduler.active):
            assert not first.done()
            await asyncio.sleep(0)
        longer = np.concatenate([prompt, some_ids(5, 1)])
        answers = await asyncio.gather(first, ask(service, longer, 90, live=live))
        assert [len(answer.ids) for answer in answers] == [200, 90]
        await settle(service)
