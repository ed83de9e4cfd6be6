"""Sums in the same order as the C++ kernels of the DCI tree, and the tree's random numbers."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

F32: TypeAlias = npt.NDArray[np.float32]
F64: TypeAlias = npt.NDArray[np.float64]

LANES = 8
WORD = (1 << 64) - 1


def padded(rows: F32) -> F32:
    n_more = -rows.shape[1] % LANES
    return np.pad(rows, ((0, 0), (0, n_more))) if n_more else rows.copy()


def dots(rows: F32, vector: F32) -> F32:
    """[n]: eight running sums, then a tree; the order of the C++ kernel."""
    products = (rows * vector).reshape(len(rows), -1, LANES)
    sums = np.zeros((len(rows), LANES), np.float32)
    for block in range(products.shape[1]):
        sums += products[:, block]
    s = sums.T
    total: F32 = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))
    return total


def square_of(values: F32 | F64) -> float:
    total = 0.0
    for value in values.tolist():
        total += value * value
    return total


def mixed(x: int) -> int:
    """One step of splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)
