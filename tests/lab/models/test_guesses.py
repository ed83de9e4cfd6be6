"""Random models with an MTP head, and what their heads guess."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from services import opener
from speculating import EVEN, drafted, say

from lab.models.random_gguf import Shape, make_random_gguf
from lab.models.shape import HEADED
from towerd.errors import ModelError

SHAPE = Shape(4, 256, 4, 2, 256, 4096, n_ctx_train=4096, ftype="F32", arch="glm4moe", n_mtp=1)
FLAGS = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3")
REPLY = 32


async def drafts(folder: Path, shape: Shape, n_prompt: int) -> tuple[int, int]:
    """Tokens that were drafted in a reply to a random prompt, and those that were right."""
    path = folder / "m.gguf"
    make_random_gguf(path, shape)
    settings: dict[str, Any] = {"ctx_size": 2048, "anticipate": False, "llama_server_args": FLAGS}
    prompt = np.random.default_rng(1).integers(300, 4096, n_prompt).tolist()
    async with opener(folder)(path, **(EVEN | settings)) as service:
        return drafted(await say(service, prompt, n_predict=REPLY, ignore_eos=True))


@pytest.mark.parametrize("arch", HEADED)
async def test_right_guesses_are_right(tmp_path: Path, arch: Any) -> None:
    n, n_right = await drafts(tmp_path, replace(SHAPE, arch=arch, guesses="right"), 20)
    assert n == n_right >= REPLY // 2


@pytest.mark.parametrize("arch", HEADED)
async def test_random_guesses_rarely_are(tmp_path: Path, arch: Any) -> None:
    n, n_right = await drafts(tmp_path, replace(SHAPE, arch=arch), 20)
    assert n > 0
    assert n_right <= n // 4


async def test_guesses_of_rows_are_right_with_many(tmp_path: Path) -> None:
    shape = replace(SHAPE, guesses="of rows")
    n, n_right = await drafts(tmp_path, shape, 1200)
    assert n_right >= 0.95 * n > 0
    n, n_right = await drafts(tmp_path, shape, 20)
    assert n_right <= n // 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "llama"}, "can have one MTP head"),
        ({"n_mtp": 2}, "can have one MTP head"),
        ({"guesses": "wild"}, "guesses must be one of"),
        ({"n_mtp": 0, "guesses": "right"}, "model with an MTP head"),
    ],
)
def test_impossible_heads_are_told_so(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(SHAPE, **change)
