"""Memories that cannot be cut are kept whole: what a turn left is taken up again, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_model import make_compressed_model
from oracle import Answer, Oracle, ask, check_greedy
from services import EmbeddedService, OpenService
from windowed_hybrid import make_windowed_hybrid

from lab.models.random_gguf import Shape

SHAPE = Shape(
    4, 128, 4, 2, 128, 448, n_ctx_train=2048, rope_freq_base=10000.0, ftype="F32", arch="lfm2"
)
WINDOW = 48
END = 4
"""<|im_end|> of the synthetic vocabulary."""


@pytest.fixture(scope="module", params=["lfm2", "deepseek4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / f"{request.param}.gguf"
    if request.param == "lfm2":
        make_windowed_hybrid(path, SHAPE, WINDOW)
    else:
        make_compressed_model(path, WINDOW)
    return path


@pytest.fixture(scope="module")
def oracle(model: Path) -> Iterator[Oracle]:
    made = Oracle(model)
    yield made
    made.close()


@pytest.fixture
def opened(service_on: OpenService, model: Path) -> Any:
    """`async with opened(...)`: a service on this test's store; of small context, for llama.cpp
    may give every sequence a cache of its own."""
    return lambda **settings: service_on(model, threads=1, anticipate=False, **settings)


def message(n: int, seed: int) -> list[int]:
    """Ordinary tokens and the end of a message."""
    return [*np.random.default_rng(seed).integers(300, 448, n - 1).tolist(), END]


def reused(answer: Answer) -> int:
    reuse = answer.finish.reuse
    return reuse.live + reuse.hot + reuse.warm


async def say(service: EmbeddedService, oracle: Oracle, prompt: list[int], n: int = 8) -> Answer:
    """A greedy answer, which is monolithic prefill's."""
    answer = await ask(service, prompt, n)
    check_greedy(oracle, prompt, answer.ids)
    return answer


async def test_turns_are_taken_up_whole(opened: Any, oracle: Oracle) -> None:
    """After a restart a turn's end is continued from; a prompt that leaves the text before it is
    evaluated from the start."""
    first = message(120, 40)
    async with opened() as service:
        assert service.engine.stats()["state_kind"] == "whole"
        one = await say(service, oracle, first)
    longer = first + one.ids + message(30, 41)
    async with opened() as service:
        two = await say(service, oracle, longer)
        assert reused(two) >= len(first) + len(one.ids) - 1
        other = first[:60] + message(30, 42)
        three = await say(service, oracle, other)
        assert reused(three) == 0


@pytest.mark.timeout(300)
async def test_branches_of_one_base(opened: Any, oracle: Oracle) -> None:
    """Sessions continue from one base side by side, are evicted and come back."""
    base, small = message(150, 50), {"live_sequences": 3, "parallel": 2, "live_tokens": 768}
    async with opened(**small) as service:
        await ask(service, base, 0, precache="base")
    turns = [base + message(20, 60 + i) for i in range(4)]
    async with opened(**small) as service:
        answers = await asyncio.gather(*(say(service, oracle, turn, 4) for turn in turns))
        assert min(reused(answer) for answer in answers) >= len(base)
        for turn, answer in zip(turns[:2], answers[:2], strict=True):
            longer = turn + answer.ids + message(10, 70)
            back = await say(service, oracle, longer, 4)
            assert reused(back) >= len(turn) + len(answer.ids) - 1


async def test_another_number_of_sequences(opened: Any, oracle: Oracle) -> None:
    """llama.cpp may refuse a state of a context for more or fewer: the prompt is evaluated, once,
    and what is stored afterwards fits."""
    prompt = message(120, 80)
    async with opened(parallel=4) as service:
        prompt += (await say(service, oracle, prompt)).ids
    n_reused = []
    for seed in (81, 82):
        async with opened(parallel=2) as service:
            n_known, prompt = len(prompt) - 1, prompt + message(20, seed)
            answer = await say(service, oracle, prompt)
            prompt += answer.ids
            n_reused.append(reused(answer) - n_known)
    assert n_reused[1] >= 0
