"""A store of many synthetic chats, without a model evaluating any."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from store_tools import turn_of

from towerd.models.bundled import bundled_model
from towerd.service import open_service
from towerd.settings.config import Config
from towerd.store import Store

BASE_TOKENS = 60


def record_chats(store: Store, n_chats: int) -> None:
    """Chats of the bundled model's tokens and of different lengths, nine of ten behind a base."""
    base = np.random.default_rng(0).integers(3, 512, BASE_TOKENS).tolist()
    for number in range(n_chats):
        rng = np.random.default_rng(number + 1)
        said = rng.integers(3, 512, 20 + number % 40).tolist()
        before = [] if number % 10 == 0 else base
        reply = rng.integers(3, 512, 9).tolist()
        store.commit_turn(turn_of(before + said, reply, session=f"chat-{number}"))


async def make_store(folder: Path, n_chats: int) -> None:
    """A store in `folder` that a daemon of the bundled model opens."""
    config = Config(
        model=bundled_model(),
        store_dir=folder,
        socket=folder.with_name("maker.sock"),
        port=0,
        ctx_size=512,
        live_tokens=2048,
        threads=1,
        hot_bytes=1 << 28,
        warm_bytes=1 << 28,
    )
    async with open_service(config) as service:
        record_chats(service.store, n_chats)
