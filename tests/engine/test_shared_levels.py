"""A prompt that several chats share is stored in level 0's format, by itself; after a restart, too."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from oracle import ask, settle
from services import EmbeddedService, OpenService
from waiting import until_async

from towerd.slots.layout import NATIVE
from towerd.store import SegmentFile
from towerd.tiers.shrink import SINKS, TAIL
from towerd.tokens import Ids

N_SHARED, N_OWN, N_CHATS = 1000, 300, 8
FORMATS = "0=q4h,1=q6h,2=q8h"


def some_ids(n: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(300, 500, n).astype(np.int32)


def stored(service: EmbeddedService, ids: Ids, p0: int, p1: int) -> Counter[str]:
    """Stored format -> how many of the positions [p0, p1) of `ids` are on disk in it."""
    found: Counter[str] = Counter()
    for node in service.store.match(ids, "local").nodes:
        if node.file is not None:
            for run in node.file.runs:
                start, end = node.file.p0 + run.row0, node.file.p0 + run.end
                n = min(end, node.p1, p1) - max(start, node.p0, p0)
                found[run.format] += max(0, n)
    return +found


def file_of(service: EmbeddedService, ids: Ids) -> SegmentFile:
    """The file that has the last rows of the shared prompt."""
    file = service.store.match(ids[:N_SHARED], "local").nodes[-1].file
    assert file is not None
    return file


async def test_eight_chats_share_a_prompt(service_on: OpenService, tiny_model: Path) -> None:
    """The first is stored as a private chat's before the others come."""
    settings: dict[str, Any] = {"ctx_size": 2048, "live_tokens": 4096, "shrink_after_s": 0}
    settings["level_formats"] = FORMATS
    shared = some_ids(N_SHARED, 0)
    chats = [np.concatenate([shared, some_ids(N_OWN, 1 + i)]) for i in range(N_CHATS)]

    def shared_in(name: str) -> bool:
        found = stored(service, chats[0], 0, N_SHARED)
        return found == {NATIVE: SINKS, name: N_SHARED - SINKS}

    async with service_on(tiny_model, **settings) as service:
        await ask(service, chats[0], 2)
        await settle(service)
        await until_async(lambda: shared_in("q8h"))
        before = file_of(service, chats[0])
        for chat in chats[1:]:
            await ask(service, chat, 2)
        await settle(service)
        await until_async(lambda: shared_in("q4h"))
        after = file_of(service, chats[0])
        assert (after.p0, after.n_rows) == (before.p0, before.n_rows)
        n_values = sum(plane.n_elements for plane in service.engine.core.layout.planes)
        four_bits = (N_SHARED - SINKS) * n_values // 2
        assert 0.9 * four_bits < before.nbytes - after.nbytes < 1.1 * four_bits
    async with service_on(tiny_model, **settings) as service:
        assert shared_in("q4h")
        for chat in chats:
            own = stored(service, chat, N_SHARED, N_SHARED + N_OWN - TAIL)
            assert own.keys() <= {"q8h", NATIVE}  # what was just written is encoded in its turn
            again = await ask(service, chat, 2)
            assert again.finish.reuse.warm + again.finish.reuse.live >= N_SHARED + N_OWN - 1
        await settle(service)
        assert shared_in("q4h")
