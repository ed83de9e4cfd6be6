"""`bench models`: both routers get the same switches; towerd evaluates what is new, llama-server all."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench.models import NAMES, SwitchedModels, drive
from lab.bench.processes import llama_router, towerd_router
from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.cli.bench.harness.models import vocab_size
from towerd.engine.llama_server.process.binary import find_binary
from towerd.errors import ConfigError

LOAD = SwitchedModels("tiny", prompt_tokens=160, switches=2)
FLAGS = ("--models-max", "1", "-c", str(LOAD.ctx_size), "-t", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models of one shape."""
    for seed, name in enumerate(NAMES):
        make_random_gguf(tmp_path / "models" / f"{name}.gguf", PRESETS["tiny"], seed=seed)
    return tmp_path


async def test_both_routers_switch(folder: Path) -> None:
    try:
        find_binary()
    except ConfigError as error:
        pytest.skip(error.message)
    n_vocab = vocab_size(folder / "models" / "one.gguf")
    ours = await drive(towerd_router(folder, *FLAGS), LOAD, n_vocab)
    theirs = await drive(llama_router(folder, *FLAGS), LOAD, n_vocab)
    n_turn = LOAD.reply_tokens + LOAD.user_tokens
    assert ours.evaluated == [LOAD.user_tokens + 1] * LOAD.switches
    assert theirs.evaluated == [LOAD.prompt_tokens + n_turn] * LOAD.switches
    for times in (ours, theirs):
        assert (len(times.first), len(times.live)) == (len(NAMES), LOAD.switches)
        assert min(*times.first, *times.ttft, *times.live, *times.load, *times.unload) > 0
