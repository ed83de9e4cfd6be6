"""When idle slots are saved beside requests that run."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from sidecar_tools import OpenSidecar, ask, prompt
from waiting import until_async

from towerd.engine.llama_server.slots import slot_upkeep


async def test_a_save_does_not_hold_up_a_first_token(
    sidecar_on: OpenSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle slot is saved when no request waits for its first token, or one waits for long."""
    loop, n_postponed = asyncio.get_running_loop(), 0
    call_later = loop.call_later

    def counting(delay_s: float, *work: Any, **more: Any) -> asyncio.TimerHandle:
        nonlocal n_postponed
        n_postponed += delay_s == slot_upkeep.PRESSED_S
        return call_later(delay_s, *work, **more)

    async with sidecar_on(parallel=2) as sidecar:
        engine, upkeep = sidecar.engine, sidecar.engine.holds.upkeep
        upkeep.idle_s = 0.0
        async with await engine.holds.hold(prompt(40, 9), "local") as hold:
            hold.launched()
            with monkeypatch.context() as patch:
                patch.setattr(loop, "call_later", counting)
                _, done = await ask(sidecar, prompt(60))
                (slot,) = (each for each in engine.holds.table.slots if each.n)
                await until_async(lambda: n_postponed > 2)
            assert slot.n_unsaved > 0
            hold.answering()
            await until_async(lambda: slot.n_unsaved == 0)
        assert upkeep.n_awaited == 0
        monkeypatch.setattr(slot_upkeep, "PATIENCE_S", 0.1)
        async with await engine.holds.hold(prompt(40, 8), "local") as hold:
            hold.launched()
            await ask(sidecar, np.concatenate([prompt(60), done.ids, prompt(30, 2)]))
            await until_async(lambda: slot.n_unsaved == 0)
            assert upkeep.n_awaited == 1
        assert upkeep.n_awaited == 0
