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
    """Two chats take turns in one slot, with the words that they have without drafts. A slot is emptied
    before it is restored: else llama-server fails where its drafts have a cache of their own."""
    model, flags = bundled_model(), ["--spec-type", "ngram-simple"]
    if kind == "draft model":
        flags = ["--spec-type", "draft-simple", "-md", str(model)]
    elif kind != "ngram":
        model, flags = tmp_path / "model.gguf", ["--spec-type", "draft-mtp"]
        make_head_gguf(model, kind.split()[0], "wrong" if "wrong" in kind else "of token")
    replies = []
    for given in ([], flags):
        chats = [words(90 + 10 * chat, chat) for chat in range(2)]
        where = {"store_dir": tmp_path / f"store-{len(given)}"}
        async with sidecar_on(model, *given, parallel=1, ctx_size=1024, **where) as sidecar:
            for turn in range(3):
                for chat, ids in enumerate(chats):
                    _, done = await ask(sidecar, ids, N_PREDICT)
                    assert done.timings.cache_n == (len(ids) - 10 if turn else 0)
                    reply = np.array(done.ids, np.int32)
                    chats[chat] = np.concatenate([ids, reply, words(9, 10 * turn + chat)])
            stats = sidecar.engine.stats()
            replies.append([chat.tolist() for chat in chats])
        assert stats["restores"] == 4
        failed = ("restores_missed", "restores_failed", "saves_failed")
        assert [stats[name] for name in failed] == [0] * len(failed)
        assert sidecar.engine.notes == []
    assert replies[0] == replies[1]
