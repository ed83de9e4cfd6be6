"""Stored states are one store's, whichever engine wrote them, and outlive both processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from daemon import Daemon
from heads import make_head_gguf
from sidecar_tools import OpenSidecar, ask, prompt
from waiting import until
from windowed_hybrid import make_windowed_hybrid

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.service import open_service
from towerd.settings.config import Config
from towerd.tokens import Ids

ENGINES = ("embedded", "llama-server")
SHAPE = replace(PRESETS["tiny"], n_layer=4)
N_PREDICT = 8
TIE = 0.02
"""Of log-probability; llama.cpp's own noise on these models stays below."""
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_tokens": True}


def words(n: int, seed: int) -> Ids:
    """Ordinary tokens of the smallest vocabulary."""
    return prompt(n, seed) % 140 + 300


def make(path: Path, arch: Any) -> Path:
    if arch == "heads":
        make_head_gguf(path, "qwen35")
    elif arch == "windowed":
        make_windowed_hybrid(path, replace(SHAPE, arch="lfm2"), 48)
    else:
        make_random_gguf(path, replace(SHAPE, arch=arch))
    return path


@pytest.mark.parametrize("first", ENGINES)
@pytest.mark.parametrize("arch", ["qwen35", "mamba", "windowed", "heads"])
async def test_either_engine_reads_the_other(
    sidecar_on: OpenSidecar, tmp_path: Path, arch: str, first: str
) -> None:
    """A chat begun on one engine continues from its end on the other, and again on the first; also where
    heads draft, whose rows no slot has."""
    model = make(tmp_path / "model.gguf", arch)
    flags = ("--spec-type", "draft-mtp") if arch == "heads" else ()
    # A whole state depends on whether flash attention is on.
    settings: dict[str, Any] = {"ctx_size": 1024, "flash_attn": "on", "anticipate": False}
    embedded = Config(
        model=model, store_dir=tmp_path / "store", socket=tmp_path / "s", live_tokens=2048,
        live_sequences=8, parallel=2, threads=1, hot_bytes=1 << 30, warm_bytes=1 << 30, **settings,
        llama_server_args=flags,
    )  # fmt: skip

    async def run(engine: str, ids: Any) -> Any:
        async with AsyncExitStack() as stack:
            opening = open_service(embedded) if engine == "embedded" else None
            on: Any = await stack.enter_async_context(
                opening or sidecar_on(model, *flags, **settings)
            )
            said = await ask(on, ids, N_PREDICT)
            return said[1], on.engine.info.row_identity

    second = ENGINES[1 - ENGINES.index(first)]
    done, written = await run(first, words(90, 0))
    longer = np.concatenate([words(90, 0), done.ids, words(7, 1)])
    again, read = await run(second, longer)
    assert written == read
    assert again.reuse.warm == 90 + N_PREDICT - 1
    assert again.session == done.session
    back, _ = await run(first, longer[:-1])
    assert back.reuse.warm == 90 + N_PREDICT - 1


async def test_whole_states_of_other_caches(sidecar_on: OpenSidecar, tmp_path: Path) -> None:
    """A state that is kept whole is never restored into caches of other types, and flags that change
    nothing keep it."""
    model = make(tmp_path / "model.gguf", "windowed")
    chat = prompt(90)
    async with sidecar_on(model, ctx_size=1024) as sidecar:
        _, done = await ask(sidecar, chat, N_PREDICT)
    chat = np.concatenate([chat, done.ids, prompt(7, 1)])
    others: dict[str, Any] = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    async with sidecar_on(model, ctx_size=1024, **others) as sidecar:
        _, again = await ask(sidecar, chat, N_PREDICT)
        assert again.reuse.warm == 0
        assert sidecar.engine.stats()["restores_failed"] == 0
    async with sidecar_on(model, "-fa", "on", ctx_size=512, parallel=1) as sidecar:
        _, again = await ask(sidecar, chat, N_PREDICT)
        assert again.reuse.warm == again.timings.cache_n == 90 + N_PREDICT - 1


def check(tokens: list[int], said: dict[str, Any]) -> None:
    """They are the same tokens, but where two are all but equally likely."""
    differ = [i for i in range(N_PREDICT) if said["tokens"][i] != tokens[i]]
    if differ:
        first, second = said["completion_probabilities"][differ[0]]["top_logprobs"]
        assert first["logprob"] - second["logprob"] < TIE


def test_killed_and_resumed(make_sidecar: Callable[..., Daemon], tmp_path: Path) -> None:
    """Both processes are killed: what was saved of a chat is restored, only what is new is evaluated, and
    the answer is that of an evaluation of everything."""
    model = make(tmp_path / "model.gguf", "qwen35")
    daemon = make_sidecar("-m", str(model), "-np", "1", "--log-level", "warning").start()

    def say(ids: list[int], **more: Any) -> dict[str, Any]:
        body = {"prompt": ids, "n_predict": N_PREDICT, **GREEDY, **more}
        reply = requests.post(daemon.url + "/completion", json=body, timeout=60)
        found: dict[str, Any] = reply.json()
        return found

    base = prompt(80, 9).tolist()
    daemon.post("/towerd/v1/precache", {"name": "base", "prompt": base})
    chat = prompt(90).tolist()
    chat += say(chat)["tokens"] + prompt(7, 1).tolist()
    chat += say(chat)["tokens"]
    n_known = len(chat) - 1
    say(prompt(90, 2).tolist())  # it takes the slot, so the chat is saved
    until(lambda: daemon.get("/towerd/v1/stats")["engine"]["boundaries_written"] > 1)
    daemon.kill_both()
    daemon.start()
    chat += prompt(7, 3).tolist()
    again = say(chat)
    assert again["timings"]["cache_n"] == n_known
    assert again["timings"]["prompt_n"] == len(chat) - n_known
    check(again["tokens"], say(chat, cache_prompt=False, n_probs=2))
    assert say(base + prompt(20, 4).tolist())["timings"]["cache_n"] >= len(base) - 1
    assert daemon.get("/towerd/v1/stats")["engine"]["restores_missed"] == 0
