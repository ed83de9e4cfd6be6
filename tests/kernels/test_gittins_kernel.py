"""Gittins indices: the best of all horizons, and the same bits in C++ as in Python."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.reference import gittins as reference_gittins
from towerd.kernels._native import gittins
from towerd.policy.predict.returns import WIDTHS_S

Table = npt.NDArray[np.float64]
SHAPES = st.tuples(st.integers(0, 4), st.integers(1, 40))


def tables(shape: tuple[int, int], seed: int) -> tuple[Table, Table]:
    """Probabilities of every size, with ties, 0 and 1 among them; and widths."""
    rng = np.random.default_rng(seed)
    chances = rng.random(shape) ** rng.integers(1, 12)
    chances[rng.random(shape) < 0.2] = rng.choice([0.0, 0.5, 1.0])
    return chances, rng.random(shape[1]) * 10.0 ** rng.integers(-3, 6) + 1e-6


@settings(deadline=None, max_examples=30)
@given(SHAPES, st.integers(0, 2**32 - 1))
def test_the_best_of_every_horizon(shape: tuple[int, int], seed: int) -> None:
    chances, widths = tables(shape, seed)
    for row, found in zip(chances, reference_gittins.gittins(chances, widths), strict=True):
        for first in range(shape[1]):
            won = spent = best = 0.0
            alive = 1.0
            for chance, width in zip(row[first:], widths[first:], strict=True):
                p_return = alive * chance
                won += p_return
                spent += (alive - p_return) * width + p_return * width / 2
                alive -= p_return
                best = max(best, won / spent)
            assert found[first] == pytest.approx(best)


@settings(deadline=None, max_examples=200)
@given(SHAPES, st.integers(0, 2**32 - 1))
def test_same_bits(shape: tuple[int, int], seed: int) -> None:
    chances, widths = tables(shape, seed)
    found, said = gittins(chances, widths), reference_gittins.gittins(chances, widths)
    assert (found.dtype, found.shape) == (said.dtype, said.shape)
    assert found.tobytes() == said.tobytes()


def test_what_has_no_answer() -> None:
    widths = np.array(WIDTHS_S)
    for wrong in (np.nan, -0.1, 1.1, np.inf):
        chances = np.full((2, len(widths)), 0.5)
        chances[1, 3] = wrong
        with pytest.raises(ValueError, match="chances"):
            gittins(chances, widths)
    with pytest.raises(ValueError, match="chances"):
        gittins(np.full((2, 5), 0.5), widths)
    for wrong in (np.nan, 0.0, np.inf):
        with pytest.raises(ValueError, match="widths"):
            gittins(np.full((1, 2), 0.5), np.array([1.0, wrong]))
