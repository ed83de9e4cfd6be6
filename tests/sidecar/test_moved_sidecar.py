"""Rows behind changed text in the slots of a real llama-server: composed, checked, labelled, stored."""

from __future__ import annotations

import numpy as np
from moved import ANYTHING
from sidecar_tools import OpenSidecar, ask, prompt

from towerd.tiers.moved_limits import BLOCK_TOKENS, block_offsets

N_RUN = 300
HEAD, OLD, NEW = prompt(20, 1), prompt(30, 2), prompt(45, 3)
RUN, REST = prompt(N_RUN, 4), prompt(9, 5)
BEFORE, AFTER = np.concatenate([HEAD, OLD, RUN]), np.concatenate([HEAD, NEW, RUN, REST])
N_CHECKED = BLOCK_TOKENS * len(block_offsets(N_RUN))
N_MOVED = N_RUN - N_CHECKED


async def test_a_run_is_kept_behind_changed_text(sidecar_on: OpenSidecar) -> None:
    async with sidecar_on(ctx_size=1024) as sidecar:
        assert sidecar.engine.why_not_movable == ""
        sidecar.tiers.moved_limits = ANYTHING
        await ask(sidecar, BEFORE)
        _, done = await ask(sidecar, AFTER)
        reuse = done.reuse
        print(reuse, done.timings, sidecar.engine.stats())
        assert (reuse.moved, reuse.checked, reuse.refused) == (N_MOVED, N_CHECKED, 0)
