"""Drafts behind a llama-server: slots are restored where its drafts work in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from heads import FIRST_WORD, make_head_gguf
from sidecar_tools import OpenSidecar, ask, prompt

from towerd.models.bundled import bundled_model
from towerd.tokens import Ids

N_PREDICT = 24


def words(n: int, seed: int) -> Ids:
    """Ordinary tokens of the smallest vocabulary."""
    return prompt(n, seed) % 60 + FIRST_WORD


@pytest.mark.parametrize("kind", ["ngram", "draft model", "qwen35", "qwen35 wrong", "glm4moe"])
async def test_every_turn_is_a_restore(sidecar_on: OpenSidecar, tmp_path: Path, kind: str) -> None:
    """A short chat takes the slot of a long one in between, which has the words that it has without drafts. A slot is emptied
    before it is restored: else llama-server fails where its drafts have a cache of their own."""
    model, flags = bundled_model(), ["--spec-type", "ngram-simple"]
    if kind == "draft model":
        flags = ["--spec-type", "draft-simple", "-md", str(model)]
    elif kind != "ngram":
        model, flags = tmp_path / "model.gguf", ["--spec-type", "draft-mtp"]
        make_head_gguf(model, kind.split()[0], "wrong" if "wrong" in kind else "of token")
    replies = []
    for given in ([], flags):
        chat = words(90, 0)
        where = {"store_dir": tmp_path / f"store-{len(given)}"}
        async with sidecar_on(model, *given, parallel=1, ctx_size=1024, **where) as sidecar:
            for turn in range(3):
                _, done = await ask(sidecar, chat, N_PREDICT)
                assert done.timings.cache_n == (len(chat) - 10 if turn else 0)
                chat = np.concatenate([chat, np.array(done.ids, np.int32), words(9, turn)])
                await ask(sidecar, words(12, 10 + turn), 2)
            stats = sidecar.engine.stats()
            replies.append(chat.tolist())
        assert stats["restores"] == 2
        failed = ("restores_missed", "restores_failed", "saves_failed")
        assert [stats[name] for name in failed] == [0] * len(failed)
        assert sidecar.engine.notes == []
    assert replies[0] == replies[1]
