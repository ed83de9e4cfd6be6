"""towerd.wire over the bundled model, and llama-server on the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from llama_wire import LlamaServer, Talker, running_server
from scripted_model import make_scripted_model

from towerd.wire import Model


@pytest.fixture(scope="session")
def story() -> Iterator[Talker]:
    made = Talker()
    yield made
    made.close()


@pytest.fixture(scope="session")
def model(story: Talker) -> Model:
    """With llama-server's defaults."""
    return story.model(defaults={"cache_prompt": False})


@pytest.fixture(scope="module")
def server() -> Iterator[LlamaServer]:
    """With its defaults."""
    with running_server() as running:
        yield running


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[[Sequence[str]], Talker]]:
    """A model that generates given tokens."""
    talkers: list[Talker] = []

    def make(script: Sequence[str]) -> Talker:
        path = tmp_path / f"{len(talkers)}.gguf"
        make_scripted_model(path, script)
        talkers.append(Talker(path))
        return talkers[-1]

    yield make
    for talker in talkers:
        talker.close()
