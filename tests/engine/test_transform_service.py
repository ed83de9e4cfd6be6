"""A chat whose rows were transform-coded, in a real service: resumed after a restart, told as approximate."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from calibrations import calibration_of
from oracle import ask, check_integrity, settle, some_ids
from services import EmbeddedService, OpenService
from waiting import until_async

from towerd.codec.rows.basis import Basis
from towerd.codec.rows.learn import Rounding, groups_of, learn
from towerd.engine.embedded.calibration import calibrate
from towerd.engine.embedded.calibration import transform as learning
from towerd.models.bundled import bundled_model
from towerd.slots.rows import KVRows, join
from towerd.store.segments.coded_format import coded_format
from towerd.tiers.formats.calibration import FormatCost, save_calibration
from towerd.tiers.formats.transform import (
    VERSION,
    TransformChoice,
    TransformCost,
    load_transform,
    save_transform,
)
from towerd.tiers.moved_limits import MovedLimits, save_moved_limits

N = 700
SOON: Any = {"shrink_after_s": 0.0, "transform_after_s": 0.0, "cache_reuse": 0, "ctx_size": 1024}
COST = FormatCost(0.004, 0.001, 0.0, 0.97, 8.0, 1024)


def native_rows(service: EmbeddedService) -> KVRows:
    """The rows of the longest chat in the store."""
    store = service.store
    leaf = max(store.nodes(), key=lambda node: node.p1)
    parts = [rows for part in store.plan_rows(leaf, 0, leaf.p1) for rows in store.rows.load(part)]
    return join([rows.token_major() for rows in parts])


def basis_of(service: EmbeddedService, rows: KVRows) -> Basis:
    """Learn from these rows."""
    identity, groups = service.engine.info.row_identity.digest(), groups_of(rows.layout, 1)
    rope = service.engine.parts.keys.rope()
    codings = {"s0.1": Rounding(0.1)}
    return learn([rows], rope, codings, row_identity=identity, groups=groups)


def use(service: EmbeddedService, rows: KVRows) -> TransformChoice:
    """Learn from these rows, and say that it was measured."""
    identity = service.engine.info.row_identity.digest()
    basis = basis_of(service, rows)
    name = service.store.rows.bases.add(basis)
    cost = TransformCost((coded_format("s0.1", basis.digest),), COST, 3.0, 0.002)
    found = TransformChoice(VERSION, name, len(rows), 1.0, basis.nbytes, {"near": cost})
    save_transform(service.store, identity.hex(), found)
    service.tiers.set_transform(cost)
    calibration = calibration_of(service.engine.info.row_identity, ("q8",) * 3)
    save_calibration(service.store, calibration)
    service.tiers.use(calibration)
    return found


async def coded(service: EmbeddedService) -> None:
    """Wait until something is transform-coded."""
    await until_async(lambda: service.tiers.stats()["warm_coded_bytes"] > 0)
    await until_async(lambda: service.tiers.stats()["segments_transformed"] > 0)


async def test_a_coded_chat_resumes_after_a_restart(service_on: OpenService) -> None:
    """What it finds is what it found before; only exact requests evaluate it anew. A damaged page costs its
    rows."""
    ids = some_ids(N)
    async with service_on(bundled_model(), name="plain", **SOON) as service:
        await ask(service, ids)
        await settle(service)
    async with service_on(bundled_model(), name="plain", **SOON) as service:
        plain = await ask(service, ids)
    async with service_on(bundled_model(), **SOON) as service:
        first = await ask(service, ids)
        await settle(service)
        before = service.tiers.stats()["warm_bytes"]
        found = use(service, native_rows(service))
        await coded(service)
        after = service.tiers.stats()["warm_bytes"]
        print(f"{before} bytes natively, {after} coded, a basis of {found.basis_bytes}")
        assert after < before / 2
        assert load_transform(service.store, service.store.state.digest.hex()) == found
        await check_integrity(service)
    async with service_on(bundled_model(), **SOON) as service:
        again = await ask(service, ids)
        assert again.finish.reuse.prefill == plain.finish.reuse.prefill == 1
        assert again.finish.reuse.warm == plain.finish.reuse.warm == N - 1
        assert again.finish.reuse.approximate > N - 4 - 128 - 64
        assert again.finish.reuse.drift is not None
        assert 0 < again.finish.reuse.drift.excess <= COST.excess
        assert first.finish.reuse.approximate == 0
        await settle(service)
        hot = await ask(service, ids)
        assert hot.finish.reuse.prefill == 1
    async with service_on(bundled_model(), fidelity="exact", ctx_size=1024) as service:
        exact = await ask(service, ids)
        assert exact.finish.reuse.approximate == 0
        assert exact.ids == first.ids
        assert exact.finish.reuse.warm == 0  # the sinks are in the same segment


async def test_codings_are_learned_when_nothing_else_runs(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the calibration; they are kept, and in force after a restart."""
    ids, made = some_ids(N), list[learning.Learned]()

    def learned(*_: object, rot_k: bool, **__: object) -> learning.Learned:
        return made[0]

    monkeypatch.setattr(calibrate, "learn_transform", learned)
    async with service_on(bundled_model(), ctx_size=1024) as service:
        engine = service.engine
        await ask(service, ids)
        await settle(service)
        basis = basis_of(service, native_rows(service))
        cost = TransformCost((coded_format("s0.1", basis.digest),), COST, 3.0, 0.002)
        made.append(learning.Learned(basis, N, {"near": cost}))
        known = calibration_of(engine.info.row_identity, ("q8",) * 3)
        save_calibration(service.store, known)
        calibrator = calibrate.Calibrator(
            engine.core,
            engine.scheduler,
            service.store,
            service.tiers,
            rotation=engine.parts.rotation,
            keys=engine.parts.keys,
            fidelity="near",
            forced=False,
            idle_s=0.1,
        )
        limits = MovedLimits(engine.info.row_identity.digest().hex(), 0.0, 0.0, 1.0)
        save_moved_limits(service.store, limits)
        await asyncio.to_thread(calibrator.start)
        await until_async(lambda: calibrator.view()["transform"] is not None)
        found = calibrator.view()["transform"]
        await asyncio.to_thread(calibrator.close)
        assert service.store.rows.bases.names() == {found["basis"]}
        assert found["choices"]["near"]["levels"] == cost.levels
    async with service_on(bundled_model(), ctx_size=1024) as service:
        assert service.engine.calibrator.view()["transform"] == found


async def test_a_damaged_page_is_evaluated_again(service_on: OpenService) -> None:
    ids = some_ids(N)
    async with service_on(bundled_model(), **SOON) as service:
        await ask(service, ids)
        await settle(service)
        use(service, native_rows(service))
        await coded(service)
        paths = [file.path for file in service.store.files() if not file.is_native]
    damage(paths[0])
    async with service_on(bundled_model(), **SOON) as service:
        answer = await ask(service, ids)
        assert 64 <= answer.finish.reuse.prefill < N
        assert answer.finish.reuse.warm > 0
        assert len(answer.ids) == 8
        await settle(service)
        report = await asyncio.to_thread(service.store.verify)
        assert report.ok, report.problems
    async with service_on(bundled_model(), **SOON) as service:
        again = await ask(service, ids)
        assert again.finish.reuse.prefill == 1


def damage(path: Path) -> None:
    """Change a byte in the middle of the rows."""
    with path.open("r+b") as file:
        at = path.stat().st_size // 2
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
