"""What a module costs: measured beside requests, and spliced only within the bound of the fidelity."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from oracle import ask, settle, some_ids
from services import OpenService
from spliced import MODULE, N_KEPT, OTHER, PROMPT, add_module

from towerd.drift import Drift
from towerd.tiers.formats.calibration import allows


async def test_measuring_beside_requests(service_on: OpenService, model_path: Path) -> None:
    """A measurement chooses at least as many tokens as it is told to, says what they cost, and
    holds nothing when it is done; requests continue meanwhile."""
    async with service_on(model_path) as service:
        maker = service.engine.modules
        assert maker is not None
        module, _ = await asyncio.gather(
            maker.measure(MODULE, 25.0), ask(service, some_ids(100, 11), 30)
        )
        assert module.n_recomputed in (25, 50, 75)
        assert module.fidelity == "near"
        assert allows("near", module.drift) or module.n_recomputed == 75
        assert module.kl > 0
        assert 0 <= module.floor_kl < 1e-4  # weights of 32 bits
        assert 0 <= module.top1 <= 1
        whole = await maker.measure(OTHER, 90.0)
        assert whole.n_recomputed == 54
        await settle(service)


async def test_a_laxer_fidelity_evaluates_less_again(
    service_on: OpenService, tiny_model: Path
) -> None:
    """Until the drift is within the bound, and no longer."""
    found = {}
    for fidelity in ("small", "near"):
        async with service_on(tiny_model, fidelity=fidelity) as service:
            maker = service.engine.modules
            assert maker is not None
            found[fidelity] = await maker.measure(MODULE, 0.0)
    assert allows("small", found["small"].drift)
    assert 0 < found["small"].n_recomputed < found["near"].n_recomputed


async def test_a_drift_beyond_the_bound_is_not_spliced(
    service_on: OpenService, tiny_model: Path
) -> None:
    """What counts is the excess over the model's noise, against the fidelity in force."""
    cases = [("near", 0.0, 0), ("near", 0.0085, N_KEPT), ("small", 0.0, N_KEPT)]
    for i, (fidelity, floor_kl, n_approximate) in enumerate(cases):
        async with service_on(tiny_model, fidelity=fidelity) as service:
            await add_module(service, kl=0.01, floor_kl=floor_kl)
            answer = await ask(service, np.concatenate([some_ids(9, 30 + i), PROMPT]))
            assert answer.finish.reuse.approximate == n_approximate
            drift = Drift(0.01, floor_kl) if n_approximate else None
            assert answer.finish.reuse.drift == drift
            await settle(service)


async def test_a_measurement_without_a_waiting_client_ends(
    service_on: OpenService, tiny_model: Path
) -> None:
    async with service_on(tiny_model) as service:
        maker = service.engine.modules
        assert maker is not None
        task = asyncio.create_task(maker.measure(MODULE, 15.0))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle(service)
