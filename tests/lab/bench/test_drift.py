"""Theorem 19's bound, on random attention and on the bundled model's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab.bench.plot import require
from lab.bench.quality.drift import (
    AttentionDrift,
    DriftMeter,
    Floats,
    LayerAttention,
    points,
    summary,
    terms,
)
from lab.bench.quality.formats import measurer_on
from lab.bench.quality.plot import plot
from towerd.engine.embedded.calibration.calibrate import calibration_text
from towerd.engine.embedded.context.taps import Taps
from towerd.errors import ConfigError
from towerd.models.bundled import bundled_model
from towerd.tiers.formats.calibration import uniform

FIRST_ORDER = 1.05
"""Slack for what is beyond first order, where no score moves by more than 0.03."""


def attend(q: Floats, keys: Floats, values: Floats) -> LayerAttention:
    """Scaled dot-product attention of `q` over all keys; shapes as in LayerAttention."""
    group = len(q) // len(keys)
    scores = q @ np.repeat(keys, group, axis=0).transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return LayerAttention(q, weights, weights @ np.repeat(values, group, axis=0), keys, values)


def moved_output(
    rng: np.random.Generator, segment: slice, eps: float, spread: float
) -> tuple[Floats, Floats, Floats]:
    """(drift, bound, whole bound), [heads, queries] each, of random attention with grouped heads
    whose keys in `segment` move by exactly `eps`."""
    q = spread * rng.normal(size=(6, 20, 16))
    keys, values = rng.normal(size=(3, 50, 16)), rng.normal(size=(3, 50, 8))
    delta = np.zeros_like(keys)
    delta[:, segment] = rng.normal(size=delta[:, segment].shape)
    delta[:, segment] *= eps / np.linalg.norm(delta[:, segment], axis=-1, keepdims=True)
    before, after = attend(q, keys, values), attend(q, keys + delta, values)
    found = terms(before, np.full(3, eps), segment)
    return np.linalg.norm(after.out - before.out, axis=-1), found.bound, found.whole_bound


@pytest.mark.parametrize("segment", [slice(0, 50), slice(0, 10), slice(30, 31)])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_bound_holds_on_random_attention(segment: slice, spread: float) -> None:
    rng = np.random.default_rng(19)
    for _ in range(5):
        drift, bound, _ = moved_output(rng, segment, 0.03 / spread / 4, spread)
        assert (drift <= FIRST_ORDER * bound).all()
        drift, _, whole = moved_output(rng, segment, 1.0, spread)  # far beyond first order
        assert (drift <= whole).all()


def test_bound_is_reached() -> None:
    """One key moved along the query, all attention equal: nothing smaller would be a bound."""
    q, keys = np.ones((1, 1, 4)), np.zeros((1, 2, 4))
    values = np.array([[[1.0], [-1.0]]])
    before = attend(q, keys, values)
    eps = 1e-4
    moved = keys.copy()
    moved[0, 0] += eps * q[0, 0] / np.linalg.norm(q)
    drift = abs(attend(q, moved, values).out - before.out).item()
    found = terms(before, np.array([eps]), slice(0, 1))
    assert found.alpha.item() == pytest.approx(0.5)
    assert drift == pytest.approx(found.bound.item(), rel=1e-3)


@pytest.fixture(scope="module")
def drift() -> AttentionDrift:
    """The bundled model on the calibration text: two places, all layers. Its queries are long:
    only the rounding of keys to 16 bits moves most scores by less than 0.03."""
    taps = Taps()
    settings = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off", "threads": "1"}
    with measurer_on(bundled_model(), calibration_text(), 2, taps, settings=settings) as measurer:
        tables = {"q8h": uniform("q8h")}
        return DriftMeter(measurer, taps).measure(
            measurer.plan.continuations, ["q4h", "q6h", "q8h", "f16"], tables
        )


def test_bound_holds_on_the_bundled_model(drift: AttentionDrift) -> None:
    """What llama.cpp's attention really does when keys are quantized: every head, every query."""
    n_first_order = 0
    for sample in drift.samples:
        moved = sample.drift - sample.noise
        assert (moved <= sample.terms.whole_bound).all()
        small = sample.terms.scale <= 0.03
        n_first_order += int(small.sum())
        assert (moved <= FIRST_ORDER * sample.terms.bound)[small].all()
    assert n_first_order > 1000
    assert {sample.layer for sample in drift.samples} == set(range(5))


def test_drift_halves_with_each_bit(drift: AttentionDrift) -> None:
    found = summary(drift)
    assert found["slope_bits"] == pytest.approx(-1.0, abs=0.15)
    assert found["share_under_whole_bound"] == 1.0
    assert found["share_under_bound"] > 0.98
    assert 0.2 < found["slope_alpha"] <= 0.6
    assert found["slope_bits_unrotated"] is None
    assert len(found["relative_drift_by_layer"]["q8h"]) == 5
    alpha, moved, _ = points(drift)
    assert len(alpha) == len(moved) > 100


@pytest.mark.parametrize("name", ["drift.svg", "drift.png"])
def test_plot(drift: AttentionDrift, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    require(tmp_path / name)
    plot(drift, tmp_path / name, "test")
    head = (tmp_path / name).read_bytes()[:200]
    assert head.startswith((b"\x89PNG", b"<?xml"))


@pytest.mark.parametrize("path", ["drift.pdf", "missing/drift.svg"])
def test_bad_plot_paths_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="--plot"):
        require(tmp_path / path)
