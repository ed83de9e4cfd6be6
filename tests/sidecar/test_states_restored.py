"""Recurrent, hybrid and whole states behind a llama-server: stored and restored as checkpoints."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_model import make_compressed_model
from sidecar_tools import OpenSidecar, Sidecar, alone, ask, prompt
from windowed_hybrid import make_windowed_hybrid

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.engine.base import Finish
from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.tokens import Ids

ARCHS: tuple[Any, ...] = ("qwen35", "mamba", "jamba")
N_PREDICT = 8
END = 4
"""<|im_end|> of the synthetic vocabulary."""
TIE = 0.02
"""Of log-probability; llama.cpp's own noise on these models stays below."""


@pytest.fixture(scope="module", params=[*ARCHS, "deepseek4", "windowed"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    if request.param == "deepseek4":
        make_compressed_model(path, 32)
    elif request.param == "windowed":
        shape = replace(PRESETS["tiny"], n_layer=4, arch="lfm2")
        make_windowed_hybrid(path, shape, 48)
    else:
        make_random_gguf(path, replace(PRESETS["tiny"], n_layer=4, arch=request.param))
    return path


def words(n: int, seed: int) -> Ids:
    """Ordinary tokens of the smallest vocabulary."""
    return prompt(n, seed) % 180 + 260


async def check(sidecar: Sidecar, reference: UpstreamClient, ids: Ids) -> Finish:
    """The same reply as from llama-server alone, but where two tokens are all but equal."""
    body = {"prompt": ids, "n_predict": N_PREDICT, "temperature": 0.0, "ignore_eos": True}
    body |= {"return_tokens": True, "cache_prompt": False, "n_probs": 2}
    said = await reference.post("/completion", body)
    _, done = await ask(sidecar, ids, N_PREDICT)
    differ = [i for i in range(N_PREDICT) if done.ids[i] != said["tokens"][i]]
    if differ:
        first, second = said["completion_probabilities"][differ[0]]["top_logprobs"]
        assert first["logprob"] - second["logprob"] < TIE
    return done


async def test_every_turn_is_a_restore(
    sidecar_on: OpenSidecar, llama_server: Path, model: Path, tmp_path: Path
) -> None:
    """Two chats take turns in one slot: llama-server takes over all that was known of each, and answers
    as one does that evaluates everything."""
    chats = [words(120 + 10 * chat, chat) for chat in range(2)]
    async with alone(llama_server, model, tmp_path, "-c", "1024") as server:
        async with sidecar_on(model, parallel=1, ctx_size=1024) as sidecar:
            for turn in range(3):
                for chat, ids in enumerate(chats):
                    done = await check(sidecar, server.upstream, ids)
                    if turn:  # all but the last message and the last token of the answer
                        n_known = len(ids) - 15 - 1
                        assert done.timings.cache_n == n_known
                        assert done.reuse.hot + done.reuse.warm == n_known
                    reply = np.array(done.ids, np.int32)
                    chats[chat] = np.concatenate([ids, reply, words(15, 10 * turn + chat)])
            stats = sidecar.engine.stats()
            assert sidecar.engine.notes == []
    assert stats["reuse_works"] == 1
    assert stats["restores"] == 4
    assert stats["restores_missed"] == stats["restores_failed"] == stats["saves_failed"] == 0


@pytest.mark.parametrize("arch", ["lfm2", "gemma3"])
async def test_edits_resume_within_the_prompt(
    sidecar_on: OpenSidecar, llama_server: Path, tmp_path: Path, arch: Any
) -> None:
    """A chat whose last message is edited, and another one behind the same system prompt, are evaluated
    from the end of the last message that they share, after another chat had the slot."""
    path = tmp_path / "model.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], n_layer=4, arch=arch, window=48))
    system, first, last = (np.append(words(n - 1, n), END) for n in (101, 90, 80))
    async with alone(llama_server, path, tmp_path, "-c", "1024") as server:
        async with sidecar_on(path, parallel=1, ctx_size=1024) as sidecar:
            await check(
                sidecar, server.upstream, np.concatenate([system, first, last, words(3, 1)])
            )
            await check(sidecar, server.upstream, words(200, 2))
            edited = np.concatenate([system, first, words(70, 3)])
            done = await check(sidecar, server.upstream, edited)
            assert done.reuse.hot + done.reuse.warm == len(system) + len(first)
            await check(sidecar, server.upstream, words(200, 4))
            other = np.concatenate([system, words(70, 5)])
            done = await check(sidecar, server.upstream, other)
            assert done.reuse.hot + done.reuse.warm == len(system)
            stats = sidecar.engine.stats()
    assert stats["restores_missed"] == stats["restores_failed"] == stats["saves_failed"] == 0


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], n_layer=4, arch="lfm2"))
    return path


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """(it began, let it end): of the first evaluation of a part of a prompt behind the probe's."""
    at, go = asyncio.Event(), asyncio.Event()
    advance = UpstreamClient.evaluate

    async def slow(self: UpstreamClient, ids: Ids, *rest: Any, **more: Any) -> int:
        if len(ids) > 60:
            at.set()
            await go.wait()
        return await advance(self, ids, *rest, **more)

    monkeypatch.setattr(UpstreamClient, "evaluate", slow)
    return at, go


async def test_a_client_that_leaves(
    sidecar_on: OpenSidecar, hybrid: Path, held: tuple[asyncio.Event, asyncio.Event]
) -> None:
    """Its slot is free again, and the next prompt is evaluated as in an empty one."""
    async with sidecar_on(hybrid, parallel=1) as sidecar:
        at, go = held
        leaving = asyncio.create_task(sidecar.engine.holds.hold(words(200, 1), "local"))
        await at.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        go.set()
        text, done = await ask(sidecar, words(200, 1))
        assert done.reuse.prefill == 200
        await ask(sidecar, words(100, 2))
        again, done = await ask(sidecar, words(200, 1))
        assert again == text
        assert done.reuse.hot + done.reuse.warm == 199
        assert sidecar.engine.stats()["running"] == 0


async def test_a_chat_that_is_deleted_while_its_prompt_is_evaluated(
    sidecar_on: OpenSidecar, hybrid: Path, held: tuple[asyncio.Event, asyncio.Event]
) -> None:
    """Nothing of it comes back with what its slot holds."""
    async with sidecar_on(hybrid, parallel=1) as sidecar:
        at, go = held
        first = words(50, 7)
        _, done = await ask(sidecar, first, 4, session="gone")
        longer = np.concatenate([first, np.array(done.ids, np.int32), words(120, 8)])
        asking = asyncio.create_task(ask(sidecar, longer, 4, session="gone"))
        await at.wait()
        await asyncio.to_thread(sidecar.store.delete_session, "gone", "local")
        go.set()
        await asking
        await sidecar.engine.settle()
        assert sidecar.engine.stats()["captured_tokens"] == 0
        assert sidecar.engine.stats()["boundary_states"] == 0
