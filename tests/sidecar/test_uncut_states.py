"""Recurrent and hybrid models behind a llama-server: served, reused by extensions, never stored."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from sidecar_tools import OpenSidecar, Sidecar, alone, ask, prompt

from lab.models.random_gguf import PRESETS, make_random_gguf
from lab.models.shape import Arch
from towerd.engine.base import Finish
from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.tokens import Ids

ARCHS: tuple[Any, ...] = ("lfm2", "mamba", "jamba")
N_PREDICT = 8
TIE = 0.02
"""Of log-probability; llama.cpp's own noise on these models stays below."""


@pytest.fixture(params=ARCHS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param not in get_args(Arch):
        pytest.skip(f"the model script makes no {request.param}")
    path = tmp_path / "model.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], n_layer=4, arch=request.param))
    return path


@asynccontextmanager
async def both(
    open_it: OpenSidecar, binary: Path, model: Path, root: Path, parallel: int
) -> AsyncIterator[tuple[Sidecar, UpstreamClient]]:
    """towerd in front of a llama-server, and one alone."""
    async with alone(binary, model, root, "-c", "1024") as server:
        async with open_it(model, parallel=parallel) as sidecar:
            yield sidecar, server.upstream


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


async def test_it_is_said(
    sidecar_on: OpenSidecar, llama_server: Path, model: Path, tmp_path: Path
) -> None:
    """What cannot be done stands in the notes, and nothing of it is tried."""
    async with both(sidecar_on, llama_server, model, tmp_path, 2) as (sidecar, reference):
        engine = sidecar.engine
        assert engine.probe.extends_only
        assert engine.stats()["reuse_works"] == 0
        (note,) = engine.notes
        assert "recurrent or hybrid" in note
        assert "exact extension" in note
        chats = [prompt(40 + 10 * i, i) for i in range(3)]
        for turn in range(3):
            for i, ids in enumerate(chats):
                done = await check(sidecar, reference, ids)
                said = np.array(done.ids, np.int32)
                chats[i] = np.concatenate([ids, said, prompt(5, 10 * turn + i)])
        stats = engine.stats()
        names = ("saves", "restores", "saves_failed", "restores_failed", "live_missed")
        assert [stats[name] for name in names] == [0] * len(names)


async def test_extensions_are_live(
    sidecar_on: OpenSidecar, llama_server: Path, model: Path, tmp_path: Path
) -> None:
    """The next turn continues from the slot; a regenerated or edited one starts over, truly."""
    async with both(sidecar_on, llama_server, model, tmp_path, 1) as (sidecar, reference):
        first = prompt(60)
        done = await check(sidecar, reference, first)
        longer = np.concatenate([first, np.array(done.ids, np.int32), prompt(7, 1)])
        again = await check(sidecar, reference, longer)
        assert again.reuse.live == again.timings.cache_n == 60 + N_PREDICT - 1
        for ids in (longer, np.concatenate([first[:30], prompt(20, 2)])):
            back = await check(sidecar, reference, ids)
            assert back.reuse.live == 0
        assert sidecar.engine.stats()["live_missed"] == 0
