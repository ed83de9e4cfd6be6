"""The store behind a llama-server: shared with the other engine, of other architectures, refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sidecar_tools import OpenSidecar, ask, prompt

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.engine.base import Finish
from towerd.errors import ConfigError, TowerdError
from towerd.service import open_service
from towerd.settings.config import Config

ENGINES = ("embedded", "llama-server")


@pytest.mark.parametrize("first", ENGINES)
@pytest.mark.parametrize("cache", ["f16", "q8_0"])
async def test_both_engines_read_one_store(
    sidecar_on: OpenSidecar, tiny_model: Path, tmp_path: Path, first: str, cache: str
) -> None:
    """A chat begun on one engine continues, restored, on the other."""
    settings: dict[str, Any] = {"cache_type_k": cache, "cache_type_v": cache, "ctx_size": 1024}

    async def with_embedded(work: Callable[[Any], Any]) -> Any:
        config = Config(
            model=tiny_model, store_dir=tmp_path / "store", socket=tmp_path / "s",
            live_tokens=2048, live_sequences=8, parallel=2, threads=1,
            hot_bytes=1 << 30, warm_bytes=1 << 30, **settings,
        )  # fmt: skip
        async with open_service(config) as service:
            return await work(service), service.engine.info.row_identity

    async def with_server(work: Callable[[Any], Any]) -> Any:
        async with sidecar_on(tiny_model, **settings) as sidecar:
            return await work(sidecar), sidecar.engine.info.row_identity

    run = [with_embedded, with_server]
    begin, go_on = run if first == "embedded" else run[::-1]
    (text, done), written = await begin(lambda on: ask(on, prompt(90)))
    longer = np.concatenate([prompt(90), done.ids, prompt(7, 1)])
    (_, again), read = await go_on(lambda on: ask(on, longer))
    assert written == read
    assert again.reuse.warm == 97
    assert again.session == done.session


@pytest.mark.parametrize("arch", ["qwen2vl", "deepseek2", "qwen3"])
async def test_other_architectures(sidecar_on: OpenSidecar, tmp_path: Path, arch: Any) -> None:
    """Cells with an extension (M-RoPE), caches without V (MLA), per-head norms."""
    path = tmp_path / "model.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], n_layer=2, n_head=4, arch=arch))
    async with sidecar_on(path, parallel=1) as sidecar:
        assert sidecar.engine.probe.can_compose, sidecar.engine.notes
        text, done = await ask(sidecar, prompt(60))
        await ask(sidecar, prompt(60, 1))
        longer = np.concatenate([prompt(60), done.ids, prompt(5, 2)])
        _, restored = await ask(sidecar, longer)
        assert restored.timings.cache_n == restored.reuse.hot == 67
        back, _ = await ask(sidecar, prompt(60))
        assert back == text


async def test_bad_starts(sidecar_on: OpenSidecar, tmp_path: Path) -> None:
    """A flag that towerd needs itself, a model that is not there; nothing is left running."""
    with pytest.raises(ConfigError, match="--port"):
        async with sidecar_on(None, "--port", "80"):
            pytest.fail("it cannot start")
    with pytest.raises(TowerdError, match="no model"):
        async with sidecar_on(tmp_path / "missing.gguf"):
            pytest.fail("it cannot start")
    async with sidecar_on() as sidecar:
        _, done = await ask(sidecar, prompt(10), 2)
        assert isinstance(done, Finish)
