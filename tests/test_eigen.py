"""Eigenvectors that are found by another process, which waits and ends when it is told to."""

from __future__ import annotations

import numpy as np
import pytest

from towerd.system.eigen import patient_eigh


class Ended(Exception):
    pass


def test_it_is_what_numpy_finds() -> None:
    values = np.random.default_rng(0).normal(size=(60, 40))
    matrix = values.T @ values
    asked = iter([True] * 5)
    found, vectors = patient_eigh(matrix, lambda: next(asked, False))
    assert np.allclose(found, np.linalg.eigvalsh(matrix))
    assert np.allclose(vectors * found @ vectors.T, matrix)


def test_it_ends_when_it_is_told_to() -> None:
    def check() -> None:
        raise Ended

    with pytest.raises(Ended):
        patient_eigh(np.eye(1200), lambda: True, check)
