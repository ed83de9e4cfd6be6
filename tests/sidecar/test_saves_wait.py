"""When idle slots are saved beside requests that run."""

from __future__ import annotations

import numpy as np
from sidecar_tools import OpenSidecar, ask, prompt
from waiting import until_async


async def test_a_save_does_not_hold_up_a_first_token(sidecar_on: OpenSidecar) -> None:
    """An idle slot is saved when no request waits for its first token, or one waits for long."""
    async with sidecar_on(parallel=2) as sidecar:
        engine, upkeep = sidecar.engine, sidecar.engine.upkeep
        _, done = await ask(sidecar, prompt(60))
        (slot,) = (each for each in engine.table.slots if each.n)
        async with await engine.lease(prompt(40, 9), "local", None) as lease:
            assert lease.slot != slot.id
            await lease.launched()
            upkeep._due(slot, slot.last_used, 0)
            await upkeep._wait()
            assert slot.n_unsaved > 0
            lease.answering()
            await until_async(lambda: slot.n_unsaved == 0)
        assert upkeep.n_awaited == 0
        await ask(sidecar, np.concatenate([prompt(60), done.ids, prompt(30, 2)]))
        assert slot.n_unsaved > 0
        async with await engine.lease(prompt(40, 8), "local", None) as lease:
            await lease.launched()
            upkeep._due(slot, slot.last_used, 10**6)
            await until_async(lambda: slot.n_unsaved == 0)
        assert upkeep.n_awaited == 0
