"""What a defect in the inference thread, and a context full of idle rows, may cost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from oracle import ask, check_integrity
from services import OpenService

from towerd.engine.embedded.run import cell_room
from towerd.errors import TowerdError


def _prompt(n: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(260, 500, n).astype(np.int32)


async def test_a_defect_costs_the_requests_that_met_it(
    service_on: OpenService, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every running request ends with an error that says where to look; the next one works."""
    async with service_on(tiny_model) as service:
        before = await ask(service, _prompt(40))
        scheduler = service.engine.scheduler
        with monkeypatch.context() as patch:
            patch.setattr(scheduler.context, "decode", lambda: 1 // 0)
            results = await asyncio.gather(
                *(ask(service, _prompt(20, seed)) for seed in (1, 2, 3)), return_exceptions=True
            )
        for error in results:
            assert isinstance(error, TowerdError)
            assert "the daemon's log" in error.message
        again = await ask(service, _prompt(40))
        assert again.ids == before.ids
        await check_integrity(service)


async def test_idle_sequences_make_room_for_speed(
    service_on: OpenService, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a request runs idle rows leave the context; they come back from RAM, unchanged."""
    monkeypatch.setattr(cell_room, "IDLE_CELLS_MAX", 64)
    async with service_on(tiny_model) as service:
        first = await ask(service, _prompt(100, 1), 8)
        await ask(service, _prompt(100, 2), 8)
        assert service.engine.pool.cells_used < 2 * 100
        again = await ask(service, _prompt(100, 1), 8)
        assert again.finish.reuse.hot == 99
        assert again.ids == first.ids
        await check_integrity(service)
