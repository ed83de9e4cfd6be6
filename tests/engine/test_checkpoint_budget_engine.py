"""A long chat with a hybrid model, its state checkpoints within a small budget."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
from oracle import ask
from services import OpenService

from lab.models.random_gguf import PRESETS, make_random_gguf

N_STATES = 8
END = 4
"""<|im_end|> of the synthetic vocabulary."""


async def test_a_long_chat_stays_within_its_budget(service_on: OpenService, tmp_path: Path) -> None:
    """Every turn continues where the last one ended, also from a store that was just opened; what
    is left of the past becomes sparse."""
    path = tmp_path / "model.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], n_layer=4, arch="lfm2"))
    rng = np.random.default_rng(1)
    ids: list[int] = []
    places: list[int] = []
    size = 0
    for opening in range(4):
        settings = {"checkpoint_bytes": N_STATES * size} if size else {}
        async with service_on(path, checkpoint_tokens=32, ctx_size=1024, **settings) as service:
            for turn in range(7):
                prompt = [*ids, *rng.integers(300, 448, 23).tolist(), END]
                answer = await ask(service, prompt, 6)
                reuse = answer.finish.reuse
                assert reuse.live + reuse.hot + reuse.warm >= len(ids) - 1
                assert opening == 0 or turn or reuse.live == 0
                ids = prompt + answer.ids
            await service.engine.settle()
            assert service.engine.checkpoint_tier is not None
            await asyncio.to_thread(service.engine.checkpoint_tier.flush)
            table = service.engine.checkpoint_tier.table
            size = max(size, *(found.nbytes for found in table.all()))
            if settings:
                assert table.file_bytes <= settings["checkpoint_bytes"]
                places = sorted(found.position for found in table.all())
                assert len(places) == N_STATES
                assert places[-1] == len(ids) - 1
    gaps = np.diff(places)
    assert gaps[:3].mean() > 2 * gaps[-3:].mean(), places
