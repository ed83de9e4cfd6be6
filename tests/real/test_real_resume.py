"""SmolLM2 continues from what was kept as from what it has just evaluated, to the bit."""

from __future__ import annotations

import asyncio
from pathlib import Path

from oracle import Oracle, ask, settle
from real_checks import (
    ROUNDING,
    check_bits,
    check_rows,
    divergence_in,
    drop_live,
    ids_of,
    joined,
    noise,
)
from real_text import BREAD, CLOCK, QUESTIONS
from services import EmbeddedService, OpenService

from towerd.tokens import Ids

N = 8
"""Tokens of a reply."""
ONE_BY_ONE = [1] * (N - 1)
"""The batches of a reply; its last token is evaluated with what comes after it."""


async def asked(service: EmbeddedService) -> tuple[Ids, Ids, Ids]:
    """A text, and two questions about it."""
    text = await ids_of(service, CLOCK + BREAD, begins=True)
    first, second = [await ids_of(service, question) for question in QUESTIONS[:2]]
    return text, first, second


async def test_from_ram_and_from_disk(
    service_on: OpenService, smollm2: Path, smollm2_oracle: Oracle
) -> None:
    """From live rows, from RAM when the live ones are gone, and from disk after a restart: only
    the question and the token before it are evaluated."""
    async with service_on(smollm2) as service:
        text, first, second = await asked(service)
        one = await ask(service, text, N)
        chat, sizes = joined(text, one.ids, first), [len(text), *ONE_BY_ONE, 1 + len(first)]
        live = await ask(service, chat, N)
        assert live.finish.reuse.live == len(text) + N - 1
        await settle(service)
        await drop_live(service)
        chat, sizes = joined(chat, live.ids, second), [*sizes, *ONE_BY_ONE, 1 + len(second)]
        hot = await ask(service, chat, N)
        assert hot.finish.reuse.hot == len(chat) - len(second) - 1
        assert hot.finish.reuse.prefill == len(second) + 1
    async with service_on(smollm2) as service:
        chat, sizes = joined(chat, hot.ids, first), [*sizes, *ONE_BY_ONE, 1 + len(first)]
        warm = await ask(service, chat, N)
        assert warm.finish.reuse.warm == len(chat) - len(first) - 1
        assert warm.finish.reuse.prefill == len(first) + 1
        assert warm.finish.session == one.finish.session
        await settle(service)
    rows = smollm2_oracle.logprobs_in(joined(chat, warm.ids[:-1]), len(text) - 1, sizes)
    at = 0
    for answer, question in ((one, first), (live, second), (hot, first), (warm, ())):
        check_rows(smollm2_oracle, rows[at : at + N], answer)
        at += N + len(question)
    assert at == len(rows)


async def test_an_answer_is_asked_for_again(
    service_on: OpenService, smollm2: Path, smollm2_oracle: Oracle
) -> None:
    """Live and after a restart one token is evaluated, and the reply is the same, as that of a
    prefill whose last token comes alone."""
    async with service_on(smollm2) as service:
        text, first, _ = await asked(service)
        prompt = joined(text, first)
        await ask(service, prompt, N)
        live = await ask(service, prompt, N)
        assert live.finish.reuse.live == len(prompt) - 1
    async with service_on(smollm2) as service:
        stored = await ask(service, prompt, N)
        assert stored.finish.reuse.warm == len(prompt) - 1
        await settle(service)
    assert (stored.ids, stored.probs) == (live.ids, live.probs)
    check_bits(smollm2_oracle, prompt, [len(prompt) - 1, 1], stored)


async def test_branches(service_on: OpenService, smollm2: Path, smollm2_oracle: Oracle) -> None:
    """Two chats on one text hold its cells once; each is as if it were alone. So is one that
    leaves the text in its middle, after a restart."""
    async with service_on(smollm2) as service:
        text, first, second = await asked(service)
        await ask(service, text, 0, precache="text")
        for question in (first, second):
            answer = await ask(service, joined(text, question), N)
            assert answer.finish.reuse.prefill == len(question)
            check_bits(smollm2_oracle, joined(text, question), [len(text), len(question)], answer)
        assert service.engine.pool.cells_used == len(text) + len(first) + len(second) + 2 * (N - 1)
        await settle(service)
    middle = len(text) // 2 // 64 * 64  # all rows of a batch up to there have the same kernel
    async with service_on(smollm2) as service:
        edited = joined(text[:middle], second)
        answer = await ask(service, edited, N)
        assert answer.finish.reuse.warm == middle
        check_bits(smollm2_oracle, edited, [middle, len(second)], answer)
        await settle(service)


async def test_side_by_side(service_on: OpenService, smollm2: Path, smollm2_oracle: Oracle) -> None:
    """Chats whose tokens are generated in batches with those of others diverge from prefill by no
    more than other batches make it diverge from itself."""
    found, floors = [], []
    async with service_on(smollm2) as service:
        text = await ids_of(service, CLOCK + BREAD, begins=True)
        await ask(service, text, 0, precache="text")
        prompts = [joined(text, await ids_of(service, question)) for question in QUESTIONS]
        answers = await asyncio.gather(*(ask(service, prompt, 24) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            n_new = len(prompt) - len(text)
            assert answer.finish.reuse.prefill == n_new
            sizes = [len(text), n_new]
            found.append(divergence_in(smollm2_oracle, prompt, sizes, answer))
            floors.append(noise(smollm2_oracle, prompt, sizes, answer))
        await settle(service)
    assert sum(found) <= 2 * sum(floors) + ROUNDING, (found, floors)
