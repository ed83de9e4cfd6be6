"""Sessions of an agent on models with a state: each prompt continues at the token where it diverges, once
the agent's prompts have diverged there before, in whatever session."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from oracle import Oracle, ask, check_greedy
from services import EmbeddedService, OpenService

from lab.models.random_gguf import Shape, make_random_gguf
from towerd.engine.anchors import APART_MIN
from towerd.tokens import common_prefix

SHAPE = Shape(4, 128, 4, 2, 128, 448, n_ctx_train=4096, rope_freq_base=10000.0, ftype="F32")
START, END = 3, 4
"""<|im_start|> and <|im_end|> of the synthetic vocabulary."""
WORD_MIN, WORD_MAX = 353, 448
"""Its tokens that begin with a space."""
N_REPLY = 4
N_SESSIONS = 3


def words(n: int, *seed: int) -> list[int]:
    return [int(id) for id in np.random.default_rng(seed).integers(WORD_MIN, WORD_MAX, n)]


USER, ASSISTANT = [START, *words(2, 20)], [START, *words(2, 21)]


@dataclass
class AgentSession:
    """What an agent program sends: a system prompt with a date, the project and tools, then messages, of
    which the last one ends with a reminder."""

    project: int
    day: int = 1
    n_tools: int = 5
    messages: list[list[int]] = field(default_factory=list)
    """Of the user and of the model in turn."""

    def system(self) -> list[int]:
        dated = words(90, 1) + words(6, 2) + words(1, 3, self.day)
        tools = [token for i in range(self.n_tools) for token in words(120, 5, i)]
        return [*dated, *words(40, 4, self.project), *words(200, 6), *tools, *words(10, 7), END]

    def prompt(self) -> list[int]:
        reminder = words(12, 8) + words(25, 9, len(self.messages))
        *earlier, last = self.messages
        turns = [
            [*(ASSISTANT if i % 2 else USER), *message, END] for i, message in enumerate(earlier)
        ]
        said = [token for turn in turns for token in turn]
        return [*self.system(), *said, *USER, *last, *reminder, END, *ASSISTANT]


@dataclass(frozen=True)
class Asked:
    """A request: how it differs from the one before, how much of it was known, how much evaluated."""

    session: int
    change: str
    n_prompt: int
    n_known: int
    n_evaluated: int


async def settle(service: EmbeddedService) -> None:
    """Wait until all checkpoints are stored."""
    await service.engine.settle()
    assert service.engine.checkpoint_tier is not None
    await asyncio.to_thread(service.engine.checkpoint_tier.flush)


async def talk(
    service: EmbeddedService, session: AgentSession, known: list[list[int]], oracle: Oracle | None
) -> list[Asked]:
    """The requests of one session. known: the tokens of all earlier ones, to which its own are added"""
    asked: list[Asked] = []

    async def send(change: str, n: int) -> None:
        session.messages.append(words(n, 10, session.project, len(asked)))
        prompt = session.prompt()
        answer = await ask(service, prompt, N_REPLY)
        if oracle is not None and change not in {each.change for each in asked}:
            check_greedy(oracle, prompt, answer.ids)
        session.messages.append(answer.ids)
        ids = np.array(prompt, np.int32)
        n_known = max((common_prefix(ids, np.array(each)) for each in known), default=0)
        reuse = answer.finish.reuse
        asked.append(Asked(session.project, change, len(prompt), n_known, reuse.prefill))
        known.append(prompt + answer.ids)
        await settle(service)

    await send("session", 100)
    for n in (160, 60, 280):
        await send("reminder", n)
    session.n_tools += 1
    await send("tools", 50)
    await send("reminder", 50)
    session.day += 1
    await send("date", 50)
    await send("reminder", 120)
    for n in (4, 2):
        del session.messages[:n]
        await send("dropped", 50)
    await send("reminder", 50)
    return asked


def table(asked: Sequence[Asked]) -> str:
    lines = []
    for change in dict.fromkeys(each.change for each in asked):
        of_it = [each for each in asked if each.change == change]
        new = sum(each.n_prompt - each.n_known for each in of_it)
        lines.append(f"{change}: {sum(each.n_evaluated for each in of_it)} evaluated, {new} new")
    return "\n".join(lines)


@pytest.mark.parametrize("arch", ["lfm2", "mamba"])
async def test_prompts_continue_where_they_diverge(
    arch: str, service_on: OpenService, tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    make_random_gguf(model, replace(SHAPE, arch=arch))  # type: ignore[arg-type]
    known: list[list[int]] = []
    oracle = Oracle(model)
    try:
        async with service_on(
            model, ctx_size=4096, live_tokens=8192, checkpoint_tokens=256
        ) as service:
            sessions = [
                await talk(service, AgentSession(i), known, oracle if i == 1 else None)
                for i in range(N_SESSIONS)
            ]
    finally:
        oracle.close()
    for asked in sessions:
        print(f"session {asked[0].session + 1}", table(asked), sep="\n")
    for each in (each for asked in sessions[1:] for each in asked):
        assert 0 <= each.n_evaluated - (each.n_prompt - each.n_known) < APART_MIN, each


@pytest.mark.parametrize("n_message", [20, 45])
async def test_oldest_turns_are_dropped_behind_the_system_prompt(
    n_message: int, service_on: OpenService, tmp_path: Path
) -> None:
    """The first time, too, and wherever messages end behind it."""
    model = tmp_path / "model.gguf"
    make_random_gguf(model, replace(SHAPE, arch="lfm2"))
    session = AgentSession(0, messages=[words(n_message, 11, i) for i in range(25)])
    async with service_on(model, ctx_size=4096, live_tokens=8192, checkpoint_tokens=256) as service:
        await ask(service, session.prompt(), N_REPLY)
        await settle(service)
        del session.messages[:4]
        prompt = session.prompt()
        answer = await ask(service, prompt, N_REPLY)
    n_new = len(prompt) - len(session.system())
    assert 0 <= answer.finish.reuse.prefill - n_new < APART_MIN
