"""Gemma 3 270M: layers with a sliding window of 512 tokens beside full ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from daemon import Daemon
from oracle import Oracle, ask
from real_checks import (
    check_bits,
    check_rows,
    divergence_in,
    drop_live,
    ids_of,
    joined,
    noise,
    said,
)
from real_text import BREAD, CLOCK, LETTER, QUESTIONS, RIVER, STORY
from services import EmbeddedService, OpenService

from towerd.tokens import Ids

N = 8
ONE_BY_ONE = [1] * (N - 1)
WINDOW = 512


async def asked(service: EmbeddedService) -> tuple[Ids, list[Ids]]:
    """A text that is longer than the window, and questions about it."""
    text = await ids_of(service, STORY, begins=True)
    assert len(text) > 1.4 * WINDOW
    return text, [await ids_of(service, question) for question in QUESTIONS]


async def settle(service: EmbeddedService) -> None:
    await service.engine.settle()
    await asyncio.to_thread(service.tiers.flush)
    await asyncio.to_thread(service.store.check_integrity)


async def test_from_ram_and_from_disk(
    service_on: OpenService, gemma: Path, gemma_oracle: Oracle
) -> None:
    """Beyond its window a chat continues from live rows, from RAM and after a restart, to the bit:
    only the question and the token before it are evaluated."""
    async with service_on(gemma) as service:
        assert service.engine.stats()["state_kind"] == "window"
        text, (first, second, third) = await asked(service)
        one = await ask(service, text, N)
        chat, sizes = joined(text, one.ids, first), [len(text), *ONE_BY_ONE, 1 + len(first)]
        live = await ask(service, chat, N)
        assert live.finish.reuse.live == len(text) + N - 1
        await settle(service)
        await drop_live(service)
        chat, sizes = joined(chat, live.ids, second), [*sizes, *ONE_BY_ONE, 1 + len(second)]
        hot = await ask(service, chat, N)
        assert hot.finish.reuse.hot == len(chat) - len(second) - 1
    async with service_on(gemma) as service:
        chat, sizes = joined(chat, hot.ids, third), [*sizes, *ONE_BY_ONE, 1 + len(third)]
        warm = await ask(service, chat, N)
        assert warm.finish.reuse.warm == len(chat) - len(third) - 1
        assert warm.finish.reuse.prefill == len(third) + 1
        await settle(service)
    rows = gemma_oracle.logprobs_in(joined(chat, warm.ids[:-1]), len(text) - 1, sizes)
    at = 0
    for answer, question in ((one, first), (live, second), (hot, third), (warm, ())):
        check_rows(gemma_oracle, rows[at : at + N], answer)
        at += N + len(question)
    assert at == len(rows)


async def test_branches(service_on: OpenService, gemma: Path, gemma_oracle: Oracle) -> None:
    """At the end of a precached text, after a restart; and in the middle of it, a window before
    its end, where rows that slid out of the window are needed again."""
    async with service_on(gemma) as service:
        text, questions = await asked(service)
        await ask(service, text, 0, precache="text")
        await settle(service)
    async with service_on(gemma) as service:
        for question in questions[:2]:
            prompt = joined(text, question)
            answer = await ask(service, prompt, N)
            assert answer.finish.reuse.prefill == len(question)
            check_bits(gemma_oracle, prompt, [len(text), len(question)], answer)
        await settle(service)
    middle = (len(text) - WINDOW) // 64 * 64
    async with service_on(gemma) as service:
        prompt = joined(text[:middle], questions[2])
        answer = await ask(service, prompt, N)
        assert answer.finish.reuse.warm == middle
        check_bits(gemma_oracle, prompt, [middle, len(questions[2])], answer)
    async with service_on(gemma) as service:
        prompt = joined(text[:WINDOW], questions[2])
        answer = await ask(service, prompt, N)
        assert answer.finish.reuse.warm == WINDOW
        check_bits(gemma_oracle, prompt, [WINDOW, len(questions[2])], answer)


@pytest.mark.parametrize("flags", [(), ("--swa-full",)])
def test_behind_a_llama_server(
    gemma: Path, gemma_oracle: Oracle, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Two chats in turn in one slot, with a cache of the window's size and one of full size: each
    is restored, beyond its window too and after a restart, and replies diverge from a prefill by
    little more than other batches make it diverge from itself."""
    settings = ("--engine", "llama-server", "-np", "1", "-c", "1536", "-t", "1")
    daemon = Daemon(tmp_path / "d", "-m", str(gemma), *settings, "--", "--no-warmup", *flags)
    found, floors = [], []
    with daemon:
        chats: list[list[int]] = []
        for first in (BREAD, CLOCK):
            body = {"content": first + RIVER + LETTER, "add_special": True}
            chats.append(daemon.post("/tokenize", body)["tokens"])
        for turn, question in enumerate(QUESTIONS):
            if turn == 2:
                assert daemon.stop() == 0, daemon.log
                daemon.start()
            for ids in chats:
                n_known = len(ids)
                assert n_known > WINDOW  # what is shorter llama-server evaluates again
                ids += daemon.post("/tokenize", {"content": question})["tokens"]
                reply = daemon.complete(ids, N, n_probs=4)
                n_reused = reply["timings"]["cache_n"]
                assert n_reused == n_known - 1 if turn else n_reused <= 1  # the other one's BOS
                if turn == 2:
                    whole, sizes = np.array(ids, np.int32), [n_known, len(ids) - n_known]
                    found.append(divergence_in(gemma_oracle, whole, sizes, said(reply)))
                    floors.append(noise(gemma_oracle, whole, sizes, said(reply)))
                ids += reply["tokens"]
        stats = daemon.get("/towerd/v1/stats")["engine"]
        assert (stats["restores"], stats["restores_missed"]) == (2, 0)
        assert daemon.stop() == 0, daemon.log
    assert sum(found) <= 4 * sum(floors), (found, floors)
