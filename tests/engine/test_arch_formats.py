"""Stored formats and models of every kind of memory: rows may shrink, states never do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrations import calibration_of
from oracle import Answer, Oracle, ask, check_greedy
from services import EmbeddedService, OpenService
from waiting import until_async

from lab.models.random_gguf import Shape, make_random_gguf
from towerd.engine.embedded.calibration.calibrate import Calibrator
from towerd.errors import NotSupported
from towerd.slots.layout import NATIVE

SHAPE = Shape(
    4, 128, 4, 2, 128, 448, n_ctx_train=2048, rope_freq_base=10000.0, ftype="F32", window=48
)
ARCHS = ("lfm2", "mamba", "gemma3", "deepseek2", "qwen2vl")
"""Hybrid, recurrent, window, MLA, M-RoPE."""
WITH_STATES = ("lfm2", "mamba")
WITHOUT_ROWS = ("mamba",)
CALIBRATED = ("deepseek2", "gemma3", "qwen2vl")
"""`test_measure_arch` measures the others: windows take many small steps."""
CALIBRATED_HERE = ("deepseek2",)
END = 4
"""<|im_end|>."""
SHRINKING = {"level_formats": "0=q8h,1=q8h", "shrink_after_s": 0.0}
APPROX_MAX = 0.25
"""What 8-bit rows of 250 tokens may change a log-probability by; another state or another row
changes it by several."""


@pytest.fixture(scope="module", params=ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(arch: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arch") / f"{arch}.gguf"
    # the latent row, one and a half heads, has to be whole blocks of 32 to be stored in any
    shape = replace(SHAPE, head_dim=64) if arch == "deepseek2" else SHAPE
    make_random_gguf(path, replace(shape, arch=arch))  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def oracle(model: Path) -> Iterator[Oracle]:
    made = Oracle(model)
    yield made
    made.close()


@pytest.fixture
def opened(service_on: OpenService, model: Path, tmp_path: Path) -> Any:
    """`async with opened("name", ...)`: a service on the store of that name."""

    def on(name: str = "store", **settings: Any) -> Any:
        fixed = {"store_dir": tmp_path / name, "checkpoint_tokens": 32, "threads": 1}
        return service_on(model, **fixed, anticipate=False, **settings)

    return on


def message(n: int, seed: int) -> list[int]:
    return [*np.random.default_rng(seed).integers(300, 448, n - 1).tolist(), END]


def states(service: EmbeddedService) -> dict[str, bytes]:
    """Every file with a state checkpoint."""
    folder = service.config.store_dir / "boundaries"
    return {path.name: path.read_bytes() for path in folder.glob("*.twb")}


async def settle(service: EmbeddedService) -> None:
    await service.engine.settle()
    await asyncio.to_thread(service.tiers.flush)
    if service.engine.checkpoint_tier is not None:
        await asyncio.to_thread(service.engine.checkpoint_tier.flush)
    await asyncio.to_thread(service.store.check_integrity)


async def shrunk(service: EmbeddedService) -> None:
    """Wait until rows are in their stored format."""
    await until_async(lambda: service.tiers.stats()["segments_shrunk"] > 0)
    await settle(service)


def worst(oracle: Oracle, prompt: list[int], answer: Answer) -> float:
    """How far a reported log-probability is from monolithic prefill's, at most."""
    ids = np.array(prompt + answer.ids[:-1], np.int32)
    rows = oracle.logprobs(ids, len(prompt) - 1)
    return max(
        abs(logprob - float(row[token]))
        for row, probs in zip(rows, answer.probs, strict=True)
        for token, logprob in {**probs.top, probs.id: probs.logprob}.items()
    )


async def test_rows_in_stored_formats(opened: Any, oracle: Oracle, arch: str) -> None:
    """Rows go to 8 bits where there are any; states are the bytes that they are beside native
    rows. What continues from such rows says so, and a daemon that promises exactness uses none."""
    first, more = message(250, 1), message(30, 2)
    async with opened("exact", fidelity="exact") as service:
        one = await ask(service, first)
        await settle(service)
        expected = states(service)
        assert bool(expected) == (arch in WITH_STATES)
    async with opened(**SHRINKING) as service:
        assert (await ask(service, first)).ids == one.ids
        await settle(service)
        if arch not in WITHOUT_ROWS:
            await shrunk(service)
            assert not all(file.is_native for file in service.store.files())
        assert states(service) == expected
    longer = first + one.ids + more
    async with opened(**SHRINKING) as service:
        two = await ask(service, longer)
        reuse = two.finish.reuse
        assert reuse.warm >= len(first) + len(one.ids) - 1
        assert (reuse.approximate > 0) == (arch not in WITHOUT_ROWS)
        assert worst(oracle, longer, two) <= APPROX_MAX
        await settle(service)
        assert {name: states(service)[name] for name in expected} == expected
    async with opened(fidelity="exact") as service:
        again = await ask(service, longer)
        check_greedy(oracle, longer, again.ids)
        assert again.finish.reuse.approximate == 0


async def test_fidelity_near(opened: Any, oracle: Oracle, arch: str) -> None:
    """Where rows can be measured, they take the formats found; elsewhere they stay native, and
    asking for a calibration says why."""
    first, more = message(250, 3), message(30, 4)
    async with opened(fidelity="near", shrink_after_s=0.0) as service:
        one = await ask(service, first)
        check_greedy(oracle, first, one.ids)
        view = service.engine.calibrator.view()
        if arch in CALIBRATED_HERE:
            await calibrated(service)
        elif arch in CALIBRATED:
            assert (view["state"], view["why"]) == ("waiting", "")
            service.tiers.use(calibration_of(service.store.state.row_identity, ("q8h",) * 3))
        else:
            assert view["state"] == "off"
            assert view["why"]
            with pytest.raises(NotSupported, match="nothing to calibrate: .*recurrent"):
                service.engine.calibrator.request(again=False)
        if service.tiers.formats is not None and not service.tiers.formats.is_native:
            await shrunk(service)
        await settle(service)
    longer = first + one.ids + more
    async with opened(fidelity="near", shrink_after_s=0.0) as service:
        two = await ask(service, longer)
        assert two.finish.reuse.warm >= len(first) + len(one.ids) - 1
        if arch in CALIBRATED:
            assert worst(oracle, longer, two) <= APPROX_MAX
        else:
            assert two.finish.reuse.approximate == 0
            assert service.tiers.stats()["segments_shrunk"] == 0
            check_greedy(oracle, longer, two.ids)


async def calibrated(service: EmbeddedService) -> None:
    """Measure which formats this model tolerates, and apply them."""
    calibrator = Calibrator(
        service.engine.core,
        service.engine.scheduler,
        service.store,
        service.tiers,
        rotation=service.engine.parts.rotation,
        fidelity="near",
        forced=False,
        idle_s=0.1,
    )
    await asyncio.to_thread(calibrator.start)
    try:
        await until_async(lambda: calibrator.view()["state"] not in ("waiting", "running"))
        view = calibrator.view()
        assert view["state"] == "done", view["why"]
        assert service.tiers.formats is not None
        assert service.tiers.formats.names != (NATIVE,) * 3
    finally:
        await asyncio.to_thread(calibrator.close)
