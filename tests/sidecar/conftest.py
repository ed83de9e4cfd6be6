"""A real llama-server behind the engine, on tiny models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon
from sidecar_tools import OpenSidecar, Sidecar, SteadyCosts
from window_model import make_window_model

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.cli.bench.harness.servers import llama_server as llama_server_alone
from towerd.engine.llama_server.opening import open_llama_server
from towerd.engine.llama_server.process.binary import find_binary
from towerd.errors import ConfigError
from towerd.models.bundled import bundled_model
from towerd.sessions.recorder import TurnRecorder
from towerd.sessions.sessions import Sessions
from towerd.settings.config import Config


@pytest.fixture(scope="session")
def llama_server() -> Path:
    """The real binary."""
    try:
        return find_binary()
    except ConfigError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, dense, 2 KV heads of 64."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], n_layer=2))
    return path


@pytest.fixture(scope="session")
def window_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, every second layer with a sliding window of 48 tokens."""
    path = tmp_path_factory.mktemp("models") / "window.gguf"
    make_window_model(path, 48)
    return path


@pytest.fixture
def sidecar_on(llama_server: Path, tmp_path: Path) -> OpenSidecar:
    """`async with sidecar_on(model, parallel=2)`: an engine on this test's own store."""

    @asynccontextmanager
    async def open_it(
        model: Path | None = None, *flags: str, **settings: Any
    ) -> AsyncIterator[Sidecar]:
        values: dict[str, Any] = {
            "engine": "llama-server",
            "model": model or bundled_model(),
            "store_dir": tmp_path / "store",
            "socket": tmp_path / "s",
            "ctx_size": 512,
            "parallel": 2,
            "threads": 1,
            "hot_bytes": 1 << 30,
            "warm_bytes": 1 << 30,
            "llama_server_args": ("--no-warmup", *flags),
        }
        config = Config(**(values | settings))
        async with open_llama_server(config) as opened:
            engine, store, tiers = opened.engine, opened.store, opened.tiers
            engine.holds.placer.policy.costs = SteadyCosts()
            sessions = Sessions(engine, TurnRecorder(store))
            try:
                yield Sidecar(config, engine, store, tiers, sessions)
            finally:
                await sessions.drain()

    return open_it


# --- towerd as a program, in front of it (test_proxy*, test_clients) ----------------------

SERVER_FLAGS = ("-c", "1024", "-np", "2", "-t", "1")
SIDECAR_FLAGS = ("--engine", "llama-server", *SERVER_FLAGS)
MakeDaemon = Callable[..., Daemon]


@pytest.fixture(scope="session")
def sidecar(llama_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """`towerd serve --engine llama-server` that many tests share; alive at the end."""
    with Daemon(tmp_path_factory.mktemp("side"), *SIDECAR_FLAGS) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.log


@pytest.fixture(scope="session")
def alone(llama_server: Path) -> Iterator[str]:
    """URL of a llama-server of the same flags without towerd."""
    model = bundled_model()
    with llama_server_alone(model, *SERVER_FLAGS, "-kvu", "--alias", model.name) as server:
        yield server.url


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, big enough that thousands of tokens take a while."""
    path = tmp_path_factory.mktemp("models") / "slow.gguf"
    make_random_gguf(path, PRESETS["tiny"])
    return path


@pytest.fixture
def make_sidecar(llama_server: Path, tmp_path: Path) -> Iterator[MakeDaemon]:
    """`make_sidecar(*flags)`: a towerd in front of a llama-server, not started; killed at the
    end."""
    made: list[Daemon] = []

    def make(*flags: str, name: str = "d", **env: str) -> Daemon:
        made.append(Daemon(tmp_path / name, *SIDECAR_FLAGS, *flags, env=env))
        return made[-1]

    yield make
    for each in made:
        if each.process is not None:
            each.kill()
