"""Every architecture resumes: what is stored gives what monolithic prefill gives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import Answer, Oracle, ask
from services import EmbeddedService, OpenService

from lab.models.random_gguf import Shape, make_random_gguf

BASE = Shape(
    4, 128, 4, 2, 128, 448, n_ctx_train=2048, rope_freq_base=10000.0, ftype="F32", window=48
)
KINDS = {
    "gemma3": "window",
    "gpt-oss": "window",
    "cohere2": "window",
    "mamba": "recurrent",
    "rwkv7": "recurrent",
    "lfm2": "hybrid",
    "granitehybrid": "hybrid",
    "jamba": "hybrid",
    "falcon-h1": "hybrid",
    "qwen35": "hybrid",
    "deepseek2": "dense",
    "qwen2vl": "dense",
    "qwen3vl": "dense",
}
EVERY = 32
"""Tokens between state checkpoints here."""
END = 4
"""<|im_end|> of the synthetic vocabulary."""


@pytest.fixture(scope="module", params=list(KINDS))
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(arch: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arch") / f"{arch}.gguf"
    make_random_gguf(path, replace(BASE, arch=arch))  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def oracle(model: Path) -> Iterator[Oracle]:
    made = Oracle(model)
    yield made
    made.close()


@pytest.fixture
def opened(service_on: OpenService, model: Path) -> Any:
    def on(**settings: Any) -> Any:
        return service_on(model, checkpoint_tokens=EVERY, **settings)

    return on


def message(n: int, seed: int) -> list[int]:
    """Ordinary tokens and the end of a message."""
    return [*np.random.default_rng(seed).integers(300, 448, n - 1).tolist(), END]


def reused(answer: Answer) -> int:
    reuse = answer.finish.reuse
    return reuse.live + reuse.hot + reuse.warm


async def settle(service: EmbeddedService) -> None:
    await service.engine.settle()
    await asyncio.to_thread(service.tiers.flush)
    if service.engine.checkpoint_tier is not None:
        await asyncio.to_thread(service.engine.checkpoint_tier.flush)
    await asyncio.to_thread(service.store.check_integrity)


def check(oracle: Oracle, prompt: list[int], answer: Answer) -> None:
    """Every token is the most likely one of monolithic prefill, every reported log-probability
    is its own, within what splitting that prefill differently changes."""
    ids = np.array(prompt + answer.ids[:-1], np.int32)
    first = len(prompt) - 1
    expected = oracle.logprobs(ids, first)
    noise = max(float(np.abs(oracle.logprobs(ids, first, n) - expected).max()) for n in (17, 64))
    bound = 4 * noise + 0.02
    assert len(answer.ids) == len(answer.probs) == len(expected)
    for row, probs, token in zip(expected, answer.probs, answer.ids, strict=True):
        allowed = np.delete(row, oracle.forbidden)
        assert allowed.max() - row[token] <= bound
        for each, logprob in {**probs.top, token: probs.logprob}.items():
            assert abs(logprob - row[each]) <= bound


async def test_a_chat_that_is_extended_branched_and_edited(
    opened: Any, oracle: Oracle, arch: str
) -> None:
    """Extend, regenerate, branch at a turn end, branch inside a turn, edit an early message."""
    first = message(100, 1) + message(60, 2)
    slack = 0 if KINDS[arch] in ("window", "dense") else EVERY + 2
    async with opened() as service:
        assert service.engine.stats()["state_kind"] == KINDS[arch]
        one = await ask(service, first)
        check(oracle, first, one)
        assert reused(one) == 0
        second = first + one.ids + message(40, 3)
        two = await ask(service, second)
        check(oracle, second, two)
        assert reused(two) >= len(first) + len(one.ids) - 1
        await settle(service)  # the checkpoint at the end of the prompt may still be being copied
        again = await ask(service, second)  # regenerate
        check(oracle, second, again)
        assert reused(again) >= len(second) - 2
        await settle(service)
        other = first + one.ids + message(40, 4)  # another question at the turn's end
        three = await ask(service, other)
        check(oracle, other, three)
        assert reused(three) >= len(first) + len(one.ids) - 1
        inside = first[:130] + message(40, 5)
        four = await ask(service, inside)
        check(oracle, inside, four)
        assert reused(four) >= 130 - slack
        edited = message(100, 1) + message(50, 6) + first[160:] + message(20, 7)
        five = await ask(service, edited)
        check(oracle, edited, five)
        assert reused(five) >= 100


async def test_restart_eviction_and_eight_sessions_on_one_base(
    opened: Any, oracle: Oracle, arch: str
) -> None:
    """A base that was precached, stored and read back carries eight sessions side by side."""
    base = message(150, 10)
    turns = [base + message(20, 20 + i) for i in range(8)]
    async with opened() as service:
        await ask(service, base, 0, precache="base")
    async with opened(live_sequences=3, parallel=2, live_tokens=768) as service:
        answers = await asyncio.gather(*(ask(service, turn, 4) for turn in turns))
        for turn, answer in zip(turns[:2], answers[:2], strict=True):
            check(oracle, turn, answer)
        assert min(reused(answer) for answer in answers) >= len(base)
        await settle(service)
        longer = turns[0] + answers[0].ids + message(20, 30)  # long evicted by now
        back = await ask(service, longer, 4)
        check(oracle, longer, back)
        assert reused(back) >= len(turns[0]) + len(answers[0].ids) - 1
    async with opened() as service:
        again = await ask(service, longer + back.ids + message(10, 31), 4)
        check(oracle, longer + back.ids + message(10, 31), again)
        assert reused(again) >= len(longer) + len(back.ids) - 1
        assert again.finish.reuse.live == 0
