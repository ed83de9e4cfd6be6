"""Clients that leave while their slot is being prepared."""

from __future__ import annotations

import asyncio

import numpy as np
import psutil
import pytest
from sidecar_tools import OpenSidecar, ask, prompt
from waiting import until_async

from towerd.engine.llama_server.engine import LlamaServerEngine
from towerd.engine.llama_server.slot_files.slotdir import PREFIX
from towerd.engine.llama_server.slots.slot import Slot
from towerd.tokens import Ids


async def leave_early(engine: LlamaServerEngine, ids: Ids) -> Slot:
    """Ask for the only slot, and leave while it is being prepared."""
    leaving = asyncio.create_task(engine.holds.hold(ids, "local"))
    slot = engine.holds.table.slots[0]
    await until_async(lambda: slot.busy)
    await asyncio.sleep(0.05)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    return slot


async def test_a_save_is_followed_to_its_end(sidecar_on: OpenSidecar) -> None:
    """llama-server saves the slot all the same: what it saved is stored, and no file is left;
    the conversation that was to leave loses nothing."""
    async with sidecar_on(parallel=1) as sidecar:
        engine = sidecar.engine
        files = set(engine.backend.slotdir.path.glob(PREFIX + "*"))
        _, done = await ask(sidecar, prompt(200))
        process = engine.backend.process
        assert process is not None
        llama_server = psutil.Process(process.pid)
        llama_server.suspend()
        try:
            slot = await leave_early(engine, prompt(100, 1))
            assert slot.busy
        finally:
            llama_server.resume()
        await until_async(lambda: not slot.busy)
        assert engine.stats()["saves"] == 1
        assert set(engine.backend.slotdir.path.glob(PREFIX + "*")) == files
        longer = np.concatenate([prompt(200), done.ids, prompt(5, 2)])
        _, again = await ask(sidecar, longer)
        assert again.reuse.live == again.timings.cache_n == 207
        assert again.session == done.session


async def test_a_restore_is_followed_to_its_end(sidecar_on: OpenSidecar) -> None:
    """Who asks again finds what was restored for the one that left."""
    async with sidecar_on(parallel=1) as sidecar:
        engine = sidecar.engine
        _, done = await ask(sidecar, prompt(200))
        await ask(sidecar, prompt(100, 1))
        await engine.settle()
        longer = np.concatenate([prompt(200), done.ids, prompt(5, 2)])
        process = engine.backend.process
        assert process is not None
        llama_server = psutil.Process(process.pid)
        llama_server.suspend()
        try:
            slot = await leave_early(engine, longer)
        finally:
            llama_server.resume()
        await until_async(lambda: not slot.busy)
        _, again = await ask(sidecar, longer)
        assert again.reuse.live == again.timings.cache_n == 207
        stats = engine.stats()
        assert (stats["restores"], stats["restores_missed"]) == (1, 0)
