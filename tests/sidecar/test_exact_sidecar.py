"""The same conversations through llama-server alone and through towerd in front of one: the same
text, with so few slots that nearly every turn is a restore."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sidecar_tools import OpenSidecar, Sidecar, alone, ask, prompt, running_again

from towerd.engine.base import Finish
from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.models.bundled import bundled_model
from towerd.tokens import Ids

TURNS = 3
CHATS = 5
N_PREDICT = 12
TIE = 0.02
"""Of log-probability; llama.cpp's own noise on these models stays below."""


@pytest.fixture(scope="module", params=["bundled", "dense", "window"])
def model(request: pytest.FixtureRequest, tiny_model: Path, window_model: Path) -> Path:
    paths = {"bundled": bundled_model(), "dense": tiny_model, "window": window_model}
    return paths[request.param]


def message(chat: int, turn: int) -> Ids:
    """What the user adds: the first one begins with what all chats share."""
    own = prompt(20 + 7 * chat, 100 * chat + turn + 1)
    return np.concatenate([prompt(70), own]) if turn == 0 else own


@dataclass(frozen=True, slots=True)
class Reply:
    """What llama-server alone says: tokens, and how far each is above the next best one."""

    prompt: Ids
    ids: list[int]
    text: str
    gaps: list[float]


Script = list[list[Reply]]
"""[chat][turn]"""


@pytest.fixture(scope="module")
def script(llama_server: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Script:
    """The conversations with llama-server alone, every prompt evaluated from the start."""

    async def run() -> Script:
        root = tmp_path_factory.mktemp("alone")
        async with alone(llama_server, model, root, "-c", "1024") as server:
            return [await _chat_alone(server.upstream, chat) for chat in range(CHATS)]

    return asyncio.run(run())


async def _chat_alone(upstream: UpstreamClient, chat: int) -> list[Reply]:
    ids: list[int] = []
    replies: list[Reply] = []
    for turn in range(TURNS):
        ids += message(chat, turn).tolist()
        body: dict[str, Any] = {"prompt": ids, "n_predict": N_PREDICT, "temperature": 0.0}
        body |= {"ignore_eos": True, "return_tokens": True, "cache_prompt": False, "n_probs": 2}
        said = await upstream.post("/completion", body)
        tops = [each["top_logprobs"] for each in said["completion_probabilities"]]
        gaps = [top[0]["logprob"] - top[1]["logprob"] for top in tops]
        replies.append(Reply(np.array(ids, np.int32), said["tokens"], said["content"], gaps))
        ids += said["tokens"]
    return replies


async def check_turn(sidecar: Sidecar, chat: int, reply: Reply) -> Finish:
    """The same reply to the same prompt. Where two tokens are all but equally likely, either may
    come first: llama.cpp itself rounds differently when a prompt is cut into other batches."""
    text, done = await ask(sidecar, reply.prompt, N_PREDICT, session=f"chat-{chat}")
    differ = [i for i in range(N_PREDICT) if done.ids[i] != reply.ids[i]]
    if differ:
        assert reply.gaps[differ[0]] < TIE, (chat, text, reply)
    else:
        assert text == reply.text
    return done


async def test_more_chats_than_slots(sidecar_on: OpenSidecar, model: Path, script: Script) -> None:
    """Five chats take turns in two slots."""
    async with sidecar_on(model, ctx_size=1024) as sidecar:
        for turn in range(TURNS):
            for chat in range(CHATS):
                await check_turn(sidecar, chat, script[chat][turn])
        stats = sidecar.engine.stats()
        sessions = await asyncio.to_thread(sidecar.store.sessions)
    assert len(sessions) == CHATS
    assert stats["restores"] >= CHATS * (TURNS - 1) - 2
    assert stats["restores_missed"] == stats["restores_failed"] == stats["saves_failed"] == 0


async def test_all_at_once(sidecar_on: OpenSidecar, model: Path, script: Script) -> None:
    """Every chat's turn is asked at the same moment: they queue for two slots."""
    async with sidecar_on(model, ctx_size=1024) as sidecar:
        for turn in range(TURNS):
            replies = [script[chat][turn] for chat in range(CHATS)]
            await asyncio.gather(*(check_turn(sidecar, c, r) for c, r in enumerate(replies)))
        assert sidecar.engine.stats()["restores_missed"] == 0


async def test_llama_server_is_killed(sidecar_on: OpenSidecar, model: Path, script: Script) -> None:
    """The child is killed twice: what was captured is restored, the rest computed."""
    async with sidecar_on(model, ctx_size=1024) as sidecar:
        process = sidecar.engine.backend.process
        assert process is not None
        for turn in range(TURNS):
            for chat in range(2):
                await check_turn(sidecar, chat, script[chat][turn])
            if turn < 2:
                await sidecar.engine.settle()
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                await running_again(sidecar)
        stats = sidecar.engine.stats()
    assert stats["restarts"] == 2
    assert stats["restores"] >= 4
    assert stats["restores_missed"] == 0


async def test_towerd_is_restarted(sidecar_on: OpenSidecar, model: Path, script: Script) -> None:
    """A new engine on the same store continues from what the old one wrote."""
    reused = 0
    for turn in range(TURNS):
        async with sidecar_on(model, ctx_size=1024) as sidecar:
            for chat in range(CHATS):
                done = await check_turn(sidecar, chat, script[chat][turn])
                reused += done.reuse.warm if turn and chat == 0 else 0
            assert sidecar.engine.stats()["restores_missed"] == 0
    assert reused >= sum(len(script[0][turn - 1].prompt) for turn in range(1, TURNS))
