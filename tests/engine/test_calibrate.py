"""The daemon's calibration: in idle time, in steps, kept, applied."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import ask, check_integrity, settle
from services import EmbeddedService, OpenService
from waiting import until_async

from towerd.engine.embedded.calibration.calibrate import Calibrator, calibration_text
from towerd.errors import NotSupported
from towerd.models.bundled import bundled_model
from towerd.slots.layout import NATIVE
from towerd.tiers.formats.calibration import BOUNDS, Calibration, load_calibration
from towerd.tokens import Ids


def prompt(n: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(260, 500, n).astype(np.int32)


async def finished(
    service: EmbeddedService, calibrator: Calibrator | None = None
) -> dict[str, Any]:
    """The view once the calibration has ended."""
    return await asyncio.to_thread(_finished, calibrator or service.engine.calibrator)


def _finished(calibrator: Calibrator) -> dict[str, Any]:
    while (view := calibrator.view())["state"] in ("running", "waiting"):
        time.sleep(0.05)
    return view


def calibrator_on(service: EmbeddedService, idle_s: float) -> Calibrator:
    """Another one on the same engine, less patient."""
    return Calibrator(
        service.engine.core,
        service.engine.scheduler,
        service.store,
        service.tiers,
        rotation=service.engine.parts.rotation,
        fidelity="near",
        forced=False,
        transforms=False,
        idle_s=idle_s,
    )


async def test_calibrates_when_idle_and_keeps_it(service_on: OpenService) -> None:
    async with service_on(bundled_model(), threads=1) as service:
        assert service.engine.calibrator.view()["state"] == "waiting"
        await asyncio.to_thread(service.engine.calibrator.close)
        calibrator = calibrator_on(service, 0.1)
        await asyncio.to_thread(calibrator.start)
        view = await finished(service, calibrator)
        assert view["state"] == "done", view["why"]
        found = Calibration.from_json(view["calibration"])
        assert found.n_tokens >= 1024
        assert found.grid.native.kl == 0
        assert found.floor.kl < 1e-4  # its weights have 32 bits
        for name, bound in BOUNDS.items():
            assert found.choices[name].bound == bound
            assert found.choices[name].cost.excess_max <= bound
        near = found.choices["near"]
        assert near.levels != (NATIVE,) * 3
        assert service.tiers.formats is not None
        assert service.tiers.formats.names == near.levels
        costs = service.tiers.stored_drift
        assert costs is not None
        assert costs.bound == BOUNDS["near"]
        digest = service.store.state.digest.hex()
        assert load_calibration(service.store, digest) == found
        limits = service.tiers.moved_limits
        assert limits is not None
        assert limits.slope > 0
        assert view["moved"] == limits.to_json()
        await check_integrity(service)  # the scratch sequence is empty
        await asyncio.to_thread(calibrator.close)
    async with service_on(bundled_model(), threads=1, fidelity="small") as service:
        view = service.engine.calibrator.view()
        assert view["state"] == "done"
        assert view["calibration"] == found.to_json()
        assert service.tiers.moved_limits == limits
        assert service.tiers.formats is not None
        assert service.tiers.formats.names == found.choices["small"].levels
    async with service_on(bundled_model(), threads=1, fidelity="exact") as service:
        assert service.engine.calibrator.view()["state"] == "done"
        assert service.tiers.formats is None


async def test_requests_run_in_between_and_stay_exact(service_on: OpenService) -> None:
    """Chats fill the live context and continue while it calibrates."""
    chats = [prompt(60 + i, i) for i in range(6)]
    async with service_on(bundled_model(), threads=1, live_tokens=512) as service:
        before = [await ask(service, chat) for chat in chats]
        assert service.engine.pool.cells_used > 250
        service.engine.calibrator.request(again=False)
        after = [await ask(service, chat, 12) for chat in chats]
        assert service.engine.calibrator.view()["state"] == "running"
        for a, b in zip(before, after, strict=True):
            assert a.probs[0].id == b.probs[0].id
            assert abs(a.probs[0].logprob - b.probs[0].logprob) < 0.01
            assert b.finish.reuse.prefill == 1  # evicted rows came back from RAM
        view = await finished(service)
        assert view["state"] == "done", view["why"]
        assert 0 < view["progress"]["done"] <= view["progress"]["total"]
        await settle(service)


async def test_again_gives_the_same(service_on: OpenService) -> None:
    async with service_on(bundled_model(), threads=1, ctx_size=512) as service:
        service.engine.calibrator.request(again=False)
        first = Calibration.from_json((await finished(service))["calibration"])
        service.engine.calibrator.request(again=False)
        assert service.engine.calibrator.view()["state"] == "done"
        service.engine.calibrator.request(again=True)
        assert service.engine.calibrator.view()["state"] == "running"
        announced = await total(service)
        view = await finished(service)
        assert view["progress"]["total"] == pytest.approx(announced, rel=0.03)
        assert view["progress"]["done"] == view["progress"]["total"]
        assert view["learning"] is None
        second = Calibration.from_json(view["calibration"])
    assert second.made_unix > first.made_unix
    assert second.ids == first.ids
    for name, choice in first.choices.items():
        assert second.choices[name].cost.kl == pytest.approx(choice.cost.kl, rel=0.2)


async def test_small_context_is_skipped(service_on: OpenService) -> None:
    async with service_on(bundled_model(), threads=1, ctx_size=256) as service:
        service.engine.calibrator.request(again=False)
        view = await finished(service)
        assert view["state"] == "failed"
        assert "at least 261 tokens" in view["why"]
        assert service.tiers.formats is None


@pytest.mark.parametrize("settings", [{"fidelity": "exact"}, {"level_formats": "0=q4h,1=q8"}])
async def test_off_when_it_would_change_nothing(
    service_on: OpenService, settings: dict[str, str]
) -> None:
    async with service_on(bundled_model(), threads=1, **settings) as service:
        before = service.tiers.formats
        view = service.engine.calibrator.view()
        assert view["state"] == ("off" if before is None else "waiting")  # moved rows are measured
        assert view["why"]
        if before is not None:
            return  # one calibration takes seconds: once is enough
        service.engine.calibrator.request(again=False)  # only to look at it
        view = await finished(service)
        assert view["state"] == "done"
        assert view["calibration"]["choices"]["near"]["levels"]
        assert service.tiers.formats == before


async def test_a_calibration_that_was_stopped_continues(service_on: OpenService) -> None:
    """What was measured is not measured again, and what is to come is announced as it is."""
    async with service_on(bundled_model(), threads=1) as service:
        key = f"calibrating:{service.store.state.digest.hex()}"
        service.engine.calibrator.request(again=False)
        announced = await total(service)
        await until_async(lambda: bool(service.store.get_meta(key)))
    async with service_on(bundled_model(), threads=1) as service:
        assert service.engine.calibrator.view()["state"] in ("waiting", "done")
        service.engine.calibrator.request(again=False)
        left = await total(service)
        assert left < announced
        view = await finished(service)
        assert view["state"] == "done", view["why"]
        assert service.store.get_meta(key) == ""
        done = view["progress"]["done"]
        assert done == view["progress"]["total"]
        assert 0.5 * left < done < 2 * left
        before = Calibration.from_json(view["calibration"])
        # pieces of another text, machine or version are no pieces of this one
        service.store.set_meta(key, '{"digest": "another", "moves": [[]]}')
        service.engine.calibrator.request(again=True)
        assert await total(service) > left
    assert before.choices.keys() == BOUNDS.keys()


async def total(service: EmbeddedService) -> int:
    """The tokens that a calibration announces."""
    view = service.engine.calibrator.view
    await until_async(lambda: view()["progress"]["total"] > 0)
    return int(view()["progress"]["total"])


async def test_a_damaged_calibration_is_made_again(service_on: OpenService) -> None:
    async with service_on(bundled_model(), threads=1) as service:
        key = f"calibration:{service.store.state.digest.hex()}"
        service.store.set_meta(key, "{")
    async with service_on(bundled_model(), threads=1) as service:
        assert service.engine.calibrator.view()["state"] == "waiting"
        service.store.set_meta(key, '{"version": 1}')  # as an earlier towerd wrote it
    async with service_on(bundled_model(), threads=1) as service:
        assert service.engine.calibrator.view()["state"] == "waiting"


async def test_model_whose_rows_cannot_be_moved(service_on: OpenService) -> None:
    async with service_on(bundled_model(), threads=1) as service:
        core = service.engine.core
        object.__setattr__(core, "why_not_movable", "for a test")
        calibrator = calibrator_on(service, 0.0)
        assert calibrator.view()["state"] == "off"
        with pytest.raises(NotSupported, match="for a test"):
            calibrator.request(again=True)
        object.__setattr__(core, "why_not_movable", "")


def test_text_is_varied_and_small() -> None:
    text = calibration_text()
    assert 30_000 < len(text.encode()) < 35_000
    for part in ("def ", '{"id"', "Assistant:", "über", "1. ", "Lily", "Kutúzov", "citizens"):
        assert part in text
    assert Path(bundled_model()).exists()


async def test_stored_rows_are_labelled_with_what_they_cost(service_on: OpenService) -> None:
    """Calibrated, shrunk, restarted: the reuse says how many tokens are approximate, and how."""
    text = prompt(300)
    async with service_on(bundled_model(), threads=1, shrink_after_s=0) as service:
        service.engine.calibrator.request(again=False)
        found = Calibration.from_json((await finished(service))["calibration"])
        cost = found.choices["near"].cost
        first = await ask(service, text, 1)
        assert first.finish.reuse.drift is None
        await settle(service)
        await asyncio.to_thread(_wait_shrunk, service)
    async with service_on(bundled_model(), threads=1) as service:
        again = await ask(service, text, 4)
        reuse = again.finish.reuse
        assert reuse.warm == 299
        assert reuse.approximate == 300 - 4 - 128
        assert reuse.drift is not None
        assert reuse.drift.floor_kl == cost.floor_kl
        assert 0 < reuse.drift.excess < cost.excess_max


def _wait_shrunk(service: EmbeddedService) -> None:
    while not service.tiers.stats()["segments_shrunk"]:
        time.sleep(0.05)
