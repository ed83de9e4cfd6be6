"""Transform codings that cannot be kept or learned now are tried again in idle time; what there is stays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from calibrations import calibration_of
from oracle import ask, settle, some_ids
from services import EmbeddedService, OpenService
from waiting import until_async

from towerd.codec.rows.basis import Basis
from towerd.codec.rows.learn import Rounding, groups_of, learn
from towerd.engine.embedded.calibration import calibrate
from towerd.engine.embedded.calibration import transform as learning
from towerd.errors import DiskFull, StoreError, TowerdError
from towerd.models.bundled import bundled_model
from towerd.slots.rows import join
from towerd.store.segments.coded_format import basis_name, coded_format
from towerd.system.eigen import EigenFailed
from towerd.tiers.formats import transform
from towerd.tiers.formats.calibration import Calibration, FormatCost, save_calibration
from towerd.tiers.formats.transform import TransformCost, load_transform
from towerd.tiers.moved_limits import MovedLimits, save_moved_limits

N = 300
COST = FormatCost(0.004, 0.001, 0.0, 0.97, 8.0, 1024)


def basis_of(service: EmbeddedService) -> Basis:
    """One that was learned from the rows in the store."""
    store, identity = service.store, service.engine.info.row_identity.digest()
    leaf = max(store.nodes(), key=lambda node: node.p1)
    parts = [rows for part in store.plan_rows(leaf, 0, leaf.p1) for rows in store.rows.load(part)]
    rows = join([each.token_major() for each in parts])
    groups, rope = groups_of(rows.layout, 1), service.engine.parts.keys.rope()
    codings = {"s0.1": Rounding(0.1)}
    return learn([rows], rope, codings, row_identity=identity, groups=groups)


class Learner:
    """Stands for what learns a basis, which takes minutes: raises what is in `errors` first."""

    def __init__(self, basis: Basis, *errors: Exception) -> None:
        cost = TransformCost((coded_format("s0.1", basis.digest),), COST, 3.0, 0.002)
        self.learned = learning.Learned(basis, N, {"near": cost})
        self.errors = list(errors)
        self.n_called = 0

    def __call__(self, *_: object, rot_k: bool, **__: object) -> learning.Learned:
        self.n_called += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.learned


@contextlib.asynccontextmanager
async def calibrated(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    """A service with rows, whose calibration is known, on which retries are due soon."""
    monkeypatch.setattr(calibrate, "LEARN_RETRY_S", (0.01, 0.02))
    async with service_on(bundled_model(), ctx_size=1024) as service:
        await ask(service, some_ids(N))
        await settle(service)
        identity = service.engine.info.row_identity
        save_calibration(service.store, calibration_of(identity, ("q8",) * 3))
        save_moved_limits(service.store, MovedLimits(identity.digest().hex(), 0.0, 0.0, 1.0))
        yield service


@contextlib.asynccontextmanager
async def calibrating(service: EmbeddedService) -> AsyncIterator[calibrate.Calibrator]:
    engine = service.engine
    calibrator = calibrate.Calibrator(
        engine.core,
        engine.scheduler,
        service.store,
        service.tiers,
        rotation=engine.parts.rotation,
        keys=engine.parts.keys,
        fidelity="near",
        forced=False,
        idle_s=0.05,
    )
    await asyncio.to_thread(calibrator.start)
    try:
        yield calibrator
    finally:
        await asyncio.to_thread(calibrator.close)


@pytest.mark.parametrize("place", ["basis", "choice"])
async def test_what_was_learned_is_kept_when_there_is_room(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The disk is full at first, when the basis is written or when the catalog is. It is learned once."""
    async with calibrated(service_on, monkeypatch) as service:
        basis = basis_of(service)
        learner = Learner(basis)
        monkeypatch.setattr(calibrate, "learn_transform", learner)
        errors: list[Exception] = [DiskFull("The disk is full."), StoreError("It fails.")]
        bases = service.store.rows.bases
        owner: object = bases if place == "basis" else calibrate
        keep = bases.add if place == "basis" else transform.save_transform

        def save(*args: Any) -> Any:
            if errors:
                raise errors.pop(0)
            return keep(*args)

        monkeypatch.setattr(owner, "add" if place == "basis" else "save_transform", save)
        async with calibrating(service) as calibrator:
            await until_async(lambda: calibrator.view()["transform"] is not None)
            found = calibrator.view()["transform"]
        assert not errors
        assert learner.n_called == 1
        assert found["basis"] == basis_name(basis.digest)
        assert bases.names() == {found["basis"]}
        kept = load_transform(service.store, service.store.state.digest.hex())
        assert kept is not None
        assert kept.to_json() == found


async def test_a_process_that_died_is_started_again(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike rows that cannot be transform-coded, which are not tried twice."""
    async with calibrated(service_on, monkeypatch) as service:
        learner = Learner(basis_of(service), EigenFailed("killed"), EigenFailed("killed"))
        monkeypatch.setattr(calibrate, "learn_transform", learner)
        async with calibrating(service) as calibrator:
            await until_async(lambda: calibrator.view()["transform"] is not None)
            assert calibrator.view()["transform"]["choices"]
        assert learner.n_called == 3


def measured_at_once(monkeypatch: pytest.MonkeyPatch, found: Calibration) -> None:
    """A calibration finds this without measuring."""
    limits = MovedLimits(found.row_identity, 0.0, 0.0, 1.0)
    result = found.floor, found.grid, dict(found.choices)
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: result)
    monkeypatch.setattr(calibrate, "choose_ends", lambda _, choice: choice)
    monkeypatch.setattr(calibrate, "plan_changes", lambda *_: [])
    monkeypatch.setattr(calibrate, "limits_of", lambda *_: limits)


async def test_what_was_learned_before_stays_where_it_cannot_be_learned_anew(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with calibrated(service_on, monkeypatch) as service:
        learner = Learner(basis_of(service))
        monkeypatch.setattr(calibrate, "learn_transform", learner)
        measured_at_once(monkeypatch, calibration_of(service.engine.info.row_identity, ("q8",) * 3))
        async with calibrating(service) as calibrator:
            await until_async(lambda: calibrator.view()["transform"] is not None)
            found = calibrator.view()["transform"]
            learner.errors = [TowerdError("There are too few tokens.")]
            calibrator.request(again=True)
            await until_async(lambda: not learner.errors)
            await until_async(lambda: calibrator.view()["transform"] is not None)
            assert calibrator.view()["transform"] == found
        kept = load_transform(service.store, service.store.state.digest.hex())
        assert kept is not None
        assert kept.to_json() == found
