"""Sliding-window models behind a llama-server with one slot: every turn is a restore."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sidecar_tools import OpenSidecar, alone, ask, prompt

from lab.models.random_gguf import PRESETS, make_random_gguf

WINDOW = 48
N_PREDICT = 8
TIE = 0.02
"""Of log-probability; llama.cpp's own noise on these models stays below."""


@pytest.fixture(scope="module", params=["gemma3", "gpt-oss", "cohere2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    shape = replace(PRESETS["tiny"], n_layer=4, window=WINDOW, arch=request.param)
    make_random_gguf(path, shape)
    return path


async def test_every_turn_is_a_restore(
    sidecar_on: OpenSidecar, llama_server: Path, model: Path, tmp_path: Path
) -> None:
    """Two chats take turns: llama-server reports that it took over all that was known of each,
    and answers as one does that evaluates everything."""
    chats = [prompt(120 + 10 * chat, chat) for chat in range(2)]
    async with alone(llama_server, model, tmp_path, "-c", "1024") as server:
        async with sidecar_on(model, parallel=1, ctx_size=1024) as sidecar:
            for turn in range(3):
                for chat, ids in enumerate(chats):
                    body: dict[str, Any] = {"prompt": ids, "n_predict": N_PREDICT}
                    body |= {"temperature": 0.0, "ignore_eos": True, "return_tokens": True}
                    body |= {"cache_prompt": False, "n_probs": 2}
                    said = await server.upstream.post("/completion", body)
                    _, done = await ask(sidecar, ids, N_PREDICT)
                    differ = [i for i in range(N_PREDICT) if done.ids[i] != said["tokens"][i]]
                    if differ:
                        tops = said["completion_probabilities"][differ[0]]["top_logprobs"]
                        assert tops[0]["logprob"] - tops[1]["logprob"] < TIE
                    if turn:  # all but the last message and the last token of the answer
                        n_known = len(ids) - 15 - 1
                        assert done.timings.cache_n == n_known
                        assert done.reuse.hot + done.reuse.warm == n_known
                    reply = np.array(done.ids, np.int32)
                    chats[chat] = np.concatenate([ids, reply, prompt(15, 10 * turn + chat)])
            stats = sidecar.engine.stats()
    assert stats["restores"] == 4
    assert stats["restores_missed"] == stats["restores_failed"] == stats["saves_failed"] == 0
