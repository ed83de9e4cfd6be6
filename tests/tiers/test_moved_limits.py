"""What deviations of moved rows have to stay under: from measured samples to the decision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store_tools import ROW_IDENTITY

from towerd.engine.embedded.calibration.moved import MovedSample, limits_of
from towerd.store import Store
from towerd.tiers.moved_limits import (
    BLOCK_TOKENS,
    STRETCH_TOKENS_MIN,
    MovedLimits,
    block_offsets,
    load_moved_limits,
    save_moved_limits,
    spread,
)

NOISE = 0.03


@pytest.mark.parametrize("n", [48, 64, 112, 127, 128, 200, 384, 1000, 8000, 100_000])
def test_blocks_lie_in_the_run_and_apart(n: int) -> None:
    offsets = block_offsets(n)
    assert offsets[0] == 0
    ends = [*offsets[1:], n]
    for at, end in zip(offsets, ends, strict=True):
        assert end - at - BLOCK_TOKENS >= STRETCH_TOKENS_MIN
    assert len(offsets) <= 6


def test_noise_counts_nothing_and_late_rows_most() -> None:
    n = 1000
    n_blocks = len(block_offsets(n))
    assert spread(n, [NOISE] * n_blocks, NOISE) == 0
    late, early = [NOISE] * n_blocks, [NOISE] * n_blocks
    late[-2] = early[1] = 0.2
    assert spread(n, late, NOISE) > 4 * spread(n, early, NOISE) > 0
    start = [0.5, *[NOISE] * (n_blocks - 1)]
    assert spread(n, start, NOISE) == 0  # the first tokens deviate behind any change
    # A run that deviates alike everywhere: its square, but for what is behind the last block.
    even = spread(n, [0.1] * n_blocks, 0.0)
    assert 0.7 * 0.01 < even < 0.01


def test_more_blocks_never_tell_less() -> None:
    """A run that was cut stays cut, whatever its later blocks would be."""
    deviations = np.random.default_rng(0).uniform(0, 0.4, 6).tolist()
    found = [spread(2000, deviations[:k], NOISE) for k in range(1, 7)]
    assert found == sorted(found)


def samples(slope: float, chance: float = 0.0) -> list[MovedSample]:
    """Runs whose excess is `slope` times their share and spread."""
    rng, made = np.random.default_rng(1), []
    for size in np.geomspace(0.035, 0.5, 20).tolist():
        deviations = [size, *(max(NOISE, size * fade) for fade in (0.6, 0.5, 0.4)), NOISE]
        excess = slope * 0.6 * spread(384, deviations, NOISE) + chance * rng.normal()
        made.append(MovedSample(384, 0.6, deviations, 0.002 + excess, 0.002))
    return made


def test_the_slope_is_found() -> None:
    assert limits_of(samples(1.3), "r").slope == pytest.approx(1.3)
    assert limits_of(samples(1.3), "r").noise == NOISE
    assert limits_of(samples(1.3, chance=3e-4), "r").slope == pytest.approx(1.3, rel=0.2)


def test_noise_never_allows_everything() -> None:
    limits = limits_of(samples(0.0), "r")
    assert limits.slope > 0
    assert not limits.allows("near", [(1000, [0.5] * 6)], 1000)


def test_runs_count_together_and_by_their_share() -> None:
    limits = MovedLimits("r", 0.0024, NOISE, 1.0)
    run = (500, [0.2, 0.08, 0.08, 0.07, 0.07, 0.06])
    alone = limits.estimate([run], 2000).excess
    assert 0 < alone < 0.002 < 2 * alone + limits.estimate([run], 1000).excess
    assert limits.estimate([run, run], 2000).excess == pytest.approx(2 * alone)
    assert limits.estimate([run], 1000).excess == pytest.approx(2 * alone)
    assert limits.allows("near", [run], 2000)
    assert not limits.allows("near", [run] * 4, 2000)
    assert limits.allows("small", [run] * 4, 2000)
    for _ in range(10):
        limits = limits.tighter()
    assert not limits.allows("near", [run], 2000)
    assert limits.allows("near", [(500, [0.2, *[NOISE] * 5])], 2000)


def test_limits_are_kept(tmp_path: Path) -> None:
    limits = MovedLimits("r", 0.0024, NOISE, 1.0).tighter()
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        assert load_moved_limits(store) is None
        save_moved_limits(store, limits)
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        assert load_moved_limits(store) == limits
        store.set_meta(f"moved:{store.state.digest.hex()}", "[1")
        assert load_moved_limits(store) is None
