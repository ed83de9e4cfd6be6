"""Real daemons, and clients for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon import Daemon
from openai import OpenAI

from lab.models.random_gguf import PRESETS, make_random_gguf

MakeDaemon = Callable[..., Daemon]


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon with the bundled model that many tests share; it has to be alive and its store
    sound when all are done."""
    shared = Daemon(tmp_path_factory.mktemp("shared"))
    with shared:
        yield shared
        assert shared.stop() == 0, shared.log
    with shared.stored():
        pass


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, big enough that thousands of tokens take a while."""
    path = tmp_path_factory.mktemp("models") / "slow.gguf"
    make_random_gguf(path, PRESETS["tiny"])
    return path


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[MakeDaemon]:
    """`make_daemon(*flags)`: a daemon of this test's own, not started; killed at the end.
    `name=` tells several apart."""
    made: list[Daemon] = []

    def make(*flags: str, name: str = "d", **env: str) -> Daemon:
        made.append(Daemon(tmp_path / name, *flags, env=env))
        return made[-1]

    yield make
    for each in made:
        if each.process is not None:
            each.kill()


@pytest.fixture
def openai(daemon: Daemon) -> Iterator[OpenAI]:
    """The openai client as anybody would make it."""
    with OpenAI(base_url=daemon.url + "/v1", api_key="none", max_retries=0) as client:
        yield client
