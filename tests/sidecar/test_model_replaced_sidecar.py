"""A model's file that another one takes the place of, in front of a llama-server."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sidecar_tools import OpenSidecar, alone, ask, prompt
from waiting import until_async

from lab.models.random_gguf import PRESETS, make_random_gguf


async def test_llama_server_starts_again_with_another_model(
    sidecar_on: OpenSidecar, tiny_model: Path, tmp_path: Path
) -> None:
    """Nothing that was computed with the old one is used, and nothing is stored any more."""
    served, other = tmp_path / "served.gguf", tmp_path / "other.gguf"
    shutil.copy(tiny_model, served)
    make_random_gguf(other, replace(PRESETS["tiny"], n_layer=2), seed=1)
    async with sidecar_on(served) as sidecar:
        engine = sidecar.engine
        _, first = await ask(sidecar, prompt(60))
        await engine.settle()
        await asyncio.to_thread(sidecar.tiers.flush)
        n_files = len(sidecar.store.files())
        assert n_files > 0
        other.replace(served)
        process = engine.backend.process
        assert process is not None
        os.kill(process.pid or 0, signal.SIGKILL)
        await until_async(lambda: engine.stats()["restarts"] == 1)
        longer = np.concatenate([prompt(60), first.ids, prompt(5, 1)])
        _, again = await ask(sidecar, longer)
        _, once_more = await ask(sidecar, longer)
        assert again.timings.cache_n == once_more.timings.cache_n == 0
        assert again.reuse.prefill == once_more.reuse.prefill == len(longer)
        await engine.settle()
        assert len(sidecar.store.files()) <= n_files
        assert any("start llama-server and towerd again" in note for note in engine.notes)
        assert sidecar.store.session_ids(again.session).tolist() == [*longer, *again.ids]


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_server_that_loaded_what_is_not_there_any_more(
    sidecar_on: OpenSidecar, llama_server: Path, tiny_model: Path, tmp_path: Path, is_replaced: bool
) -> None:
    """towerd finds another file under the model's name than the server has read: it stores nothing
    of it. A file that was merely touched since is believed."""
    served, other = tmp_path / "served.gguf", tmp_path / "other.gguf"
    shutil.copy(tiny_model, served)
    make_random_gguf(other, replace(PRESETS["tiny"], n_layer=2), seed=1)
    shared = tmp_path / "slots"
    shared.mkdir(mode=0o700)
    flags = ("--slot-save-path", str(shared), "-np", "2", "-c", "1024")
    async with alone(llama_server, served, tmp_path, *flags) as process:
        if is_replaced:
            other.replace(served)
        served.touch()
        settings = {"slot_dir": shared, "llama_server_args": ()}
        settings |= {"upstream": process.upstream.url, "upstream_key": process.upstream.key}
        async with sidecar_on(served, **settings) as sidecar:
            _, done = await ask(sidecar, prompt(60))
            await sidecar.engine.settle()
            await asyncio.to_thread(sidecar.tiers.flush)
            assert bool(sidecar.store.files()) is not is_replaced
            assert any("changed or replaced" in n for n in sidecar.engine.notes) is is_replaced
            assert len(sidecar.store.session_ids(done.session)) == 68
