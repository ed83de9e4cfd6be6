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
    RunProfile,
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
    assert len(offsets) <= 8


def profile(n: int, *deviations: float) -> RunProfile:
    return RunProfile(n, list(deviations))


def test_noise_counts_nothing_and_all_places_alike() -> None:
    n, n_later = 1000, len(block_offsets(1000)) - 1
    assert spread(profile(n, *[NOISE] * (1 + n_later)), NOISE) == 0
    start = profile(n, 0.5, *[NOISE] * n_later)
    assert spread(start, NOISE) == 0  # the first tokens deviate behind any change
    assert spread(profile(n, *[0.1] * (1 + n_later)), 0.0) == pytest.approx(0.01)
    for place in range(n_later):
        later = [NOISE] * n_later
        later[place] = 0.2
        assert spread(profile(n, 0.3, *later), NOISE) == pytest.approx(
            (0.2**2 - NOISE**2) / n_later
        )
    assert 0 < spread(profile(32, 0.2), NOISE) < 0.2**2  # it has no other block


def test_of_a_run_that_was_cut_the_blocks_up_to_there_tell() -> None:
    """What they say is not spread over blocks that are evaluated like anything else."""
    run = profile(1000, 0.3, 0.1, 0.1)
    before = spread(run, 0.0)
    run.is_cut = True
    assert before < spread(run, 0.0) == pytest.approx(0.1**2)


def test_more_blocks_never_tell_less() -> None:
    """A run that was cut stays cut, whatever its later blocks would be."""
    deviations = np.random.default_rng(0).uniform(0, 0.4, 8).tolist()
    found = [spread(profile(2000, *deviations[:k]), NOISE) for k in range(1, 9)]
    assert found == sorted(found)


def samples(slope: float, chance: float = 0.0) -> list[MovedSample]:
    """Runs that cost the continuation of a text `slope` times their spread."""
    rng, made = np.random.default_rng(1), []
    for size in np.geomspace(0.035, 0.5, 20).tolist():
        later = [max(NOISE, size * fade) for fade in (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)]
        run = profile(384, size, *later, NOISE)
        excess = slope * spread(run, NOISE) + chance * rng.normal()
        made.append(MovedSample(run, 0.002 + excess, 0.002))
    return made


def test_the_slope_is_found() -> None:
    limits = limits_of(samples(0.5), "r")
    assert limits.slope == pytest.approx(0.4 * 0.5)  # as an answer counts
    assert limits.noise == NOISE
    assert limits_of(samples(0.5, chance=3e-4), "r").slope == pytest.approx(0.2, rel=0.1)


def test_noise_never_allows_everything() -> None:
    limits = limits_of(samples(0.0), "r")
    assert not limits.allows("near", profile(1000, *[0.5] * 8))


def test_a_run_is_judged_by_itself_and_estimated_by_its_share() -> None:
    limits = MovedLimits("r", 0.0024, NOISE, 0.5)
    run = profile(500, 0.2, *[0.06] * 7)
    assert limits.allows("near", run)
    one = limits.estimate([run], 2000).excess
    assert limits.estimate([run, run], 2000).excess == pytest.approx(2 * one)
    assert limits.estimate([run], 500).excess == pytest.approx(4 * one)
    assert 4 * one < 0.002
    deviating = profile(500, 0.2, *[0.12] * 7)
    assert not limits.allows("near", deviating)
    assert limits.allows("small", deviating)
    for _ in range(10):
        limits = limits.tighter()
    assert not limits.allows("near", run)
    assert limits.allows("near", profile(500, 0.2, *[NOISE] * 7))


def test_limits_are_kept(tmp_path: Path) -> None:
    limits = MovedLimits("r", 0.0024, NOISE, 0.5).tighter()
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        assert load_moved_limits(store) is None
        save_moved_limits(store, limits)
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        assert load_moved_limits(store) == limits
        store.set_meta(f"moved:{store.state.digest.hex()}", "[1")
        assert load_moved_limits(store) is None
