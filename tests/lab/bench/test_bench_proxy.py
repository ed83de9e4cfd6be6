"""The figures that `bench proxy` derives from measured times."""

from __future__ import annotations

import numpy as np
import pytest

from lab.bench.proxy import added_error_ms, added_ms, turn_order


def test_what_is_added_is_told_from_what_varies_for_both() -> None:
    """Turns of very different lengths, each 2 ms longer behind towerd, in any order."""
    rng = np.random.default_rng(0)
    direct = rng.uniform(10, 500, 101)
    assert added_ms(direct.tolist(), (direct + 2).tolist()) == pytest.approx(2)
    assert added_error_ms(direct.tolist(), (direct + 2).tolist()) == pytest.approx(0, abs=1e-9)


def test_the_error_covers_the_truth_as_often_as_it_says() -> None:
    """Of 400 samples with a known median about 95 % lie within the error."""
    rng = np.random.default_rng(1)
    direct = np.zeros(144).tolist()
    hits = 0
    for _ in range(400):
        sidecar = rng.normal(2, 5, 144).tolist()
        hits += abs(added_ms(direct, sidecar) - 2) <= added_error_ms(direct, sidecar)
    assert 0.9 <= hits / 400 <= 0.99


def test_neither_is_always_first() -> None:
    firsts = [turn_order(turn)[0] for turn in range(8)]
    assert firsts.count(0) == firsts.count(1) == 4
    assert all(set(turn_order(turn)) == {0, 1} for turn in range(8))
