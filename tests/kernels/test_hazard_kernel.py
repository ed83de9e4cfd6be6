"""Probabilities of return: numpy against the formula, and C++ against numpy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.reference import hazard as reference_hazard
from towerd.kernels import hazard
from towerd.kernels.hazard import HazardWeights, Table

SHAPES = st.tuples(st.integers(0, 5), *[st.integers(1, 6)] * 4)


def some(shape: tuple[int, ...], seed: int) -> tuple[HazardWeights, Table, list[int]]:
    """Weights, features, many of which are 0, and curves; shape: rows, features, hidden, bins, curves."""
    n, n_features, n_hidden, n_bins, n_curves = shape
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-2, 2)
    weights = HazardWeights(
        rng.normal(0.0, scale, (n_features, n_hidden)),
        rng.normal(0.0, scale, n_hidden),
        rng.normal(0.0, scale, (n_hidden, n_bins)),
        rng.normal(0.0, scale, (n_curves, n_bins)),
    )
    x = rng.normal(size=(n, n_features)) * rng.integers(0, 2, (n, n_features))
    return weights, x, rng.integers(0, n_curves, n).tolist()


def by_hand(weights: HazardWeights, x: list[float], curve: int, b: int) -> float:
    """One number, without any array."""
    score = float(weights.logits[curve, b])
    for unit, bias in enumerate(weights.b1.tolist()):
        value = bias + sum(x[i] * float(weights.w1[i, unit]) for i in range(len(x)))
        score += max(0.0, value) * float(weights.correction[unit, b])
    return 1.0 / (1.0 + math.exp(-min(30.0, max(-30.0, score))))


@settings(deadline=None, max_examples=100)
@given(SHAPES, st.integers(0, 2**32 - 1))
def test_one_number_at_a_time(shape: tuple[int, ...], seed: int) -> None:
    weights, x, of = some(shape, seed)
    found = hazard.chances(weights, x, of)
    assert found.shape == (len(of), shape[3])
    for row, features, curve in zip(found, x.tolist(), of, strict=True):
        said = [by_hand(weights, features, curve, b) for b in range(shape[3])]
        assert row.tolist() == pytest.approx(said, rel=1e-9)


def test_what_has_no_answer() -> None:
    weights, x, of = some((2, 3, 4, 5, 6), 0)
    for wrong in ([0, 6], [-1, 0]):
        with pytest.raises(ValueError, match="of"):
            hazard.chances(weights, x, wrong)
    for rows in (x[:1], np.ascontiguousarray(x[:, :2])):
        with pytest.raises(ValueError, match="x"):
            hazard.chances(weights, rows, of)
    with pytest.raises(ValueError, match="weights"):
        hazard.chances(replace(weights, b1=np.zeros(3)), x, of)


def test_as_the_reference() -> None:
    weights, x, of = some((3, 4, 5, 6, 2), 1)
    found = hazard.chances(weights, x, of)
    assert np.allclose(found, reference_hazard.chances(weights, x, of), rtol=1e-12)
