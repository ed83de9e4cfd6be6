"""Rows behind changed text on every memory that allows it: compressed keys, several positions, windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from any_arch import make_arch_gguf
from moved import allow, difference, moved_logprobs
from oracle import Oracle, ask, settle
from roped import WINDOWED
from services import OpenService

from lab.models.architectures import ARCHITECTURES
from lab.models.random_gguf import Shape, make_random_gguf
from towerd.tiers.moved_limits import BLOCK_TOKENS, block_offsets
from towerd.tokens import Ids

BASE = Shape(
    4, 128, 4, 2, 128, 448, n_ctx_train=2048, rope_freq_base=10000.0, ftype="F32", window=48
)
NOISE = 0.01
N_RUN = 250


def ids_of(n: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(300, 448, n).astype(np.int32)


def make(folder: Path, name: str) -> Path:
    """A model of a random one's architecture, or of one of `roped.WINDOWED`."""
    model = folder / f"{name}.gguf"
    if name in ARCHITECTURES:
        make_random_gguf(model, replace(BASE, arch=name))
    else:
        make_arch_gguf(model, *WINDOWED[name])
    return model


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "gpt-oss",
        "cohere2",
        "deepseek2",
        "qwen2vl",
        "qwen3vl",
        "gemma3n",
        "gemma4",
        "olmo2-windowed",
        "laguna",
    ],
)
async def test_rows_are_moved(name: str, service_on: OpenService, tmp_path: Path) -> None:
    model = make(tmp_path, name)
    head, old, new, run, rest = map(ids_of, (20, 30, 45, N_RUN, 9), range(5))
    before, after = np.concatenate([head, old, run]), np.concatenate([head, new, run, rest])
    async with service_on(model) as service:
        assert service.engine.why_not_movable == ""
        allow(service)
        await ask(service, before)
        answer = await ask(service, after)
        assert answer.finish.reuse.moved == N_RUN - BLOCK_TOKENS * len(block_offsets(N_RUN))
        await settle(service)
    oracle = Oracle(model)
    try:
        expected = moved_logprobs(
            oracle, before, after, len(head) + len(old), len(head) + len(new), N_RUN, answer
        )
        assert difference(expected, answer) <= NOISE
        assert (
            difference(
                oracle.logprobs(
                    np.concatenate([after, np.array(answer.ids[:-1], np.int32)]), len(after) - 1
                ),
                answer,
            )
            > 2 * NOISE
        )
    finally:
        oracle.close()


@pytest.mark.parametrize("arch", ["lfm2", "mamba"])
async def test_a_state_cannot_be_moved(arch: str, service_on: OpenService, tmp_path: Path) -> None:
    async with service_on(make(tmp_path, arch)) as service:
        assert "recurrent" in service.engine.why_not_movable
