"""The Walsh-Hadamard transform of the reference, which rows of formats with a rotation and rotated keys
are compared with: the matrix that it stands for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from kernel_rows import numbers, same

from lab import reference
from lab.reference.hadamard import transform
from towerd.kernels import dispatch

BLOCKS = [32, 64, 128, 256, 512]
TOLERANCE = 3e-6
"""Relative to the largest sum: a number is added 9 times at most, half a unit lost each time."""


def _matrix(block: int) -> npt.NDArray[np.float64]:
    bits = np.arange(block)[:, None] & np.arange(block)
    ones = np.array([[bin(int(value)).count("1") for value in row] for row in bits])
    signs = np.where(ones % 2, -1.0, 1.0)
    return np.asarray(signs / np.sqrt(block))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_is_the_matrix(block: int, n: int) -> None:
    """Each run times the Walsh-Hadamard matrix, which is its own inverse."""
    values = numbers(n, 3 * block)
    out = transform(values, block)
    product = values.astype(np.float64).reshape(-1, block) @ _matrix(block)
    assert np.allclose(out.reshape(-1, block), product, rtol=0, atol=TOLERANCE * 40 * block**0.5)
    assert np.allclose(transform(out, block), values, rtol=0, atol=TOLERANCE * 160)


@pytest.mark.parametrize("block", BLOCKS)
def test_kernels_do_the_same(kernels: str, block: int) -> None:
    """To the bit, of keys that turn by no angle: transformed twice. Subnormal numbers keep their
    bits' worth; infinity and NaN stay in their own run."""
    values = numbers(5, 2 * block)
    values[0] = 1e-41
    values[1, 3], values[2, block + 6] = np.inf, np.nan
    out = np.zeros_like(values)
    cos, sin = np.ones((1, block // 2), np.float32), np.zeros((1, block // 2), np.float32)
    rotation = ("f32", cos, sin, None, block, block, 0, True, block)
    expected = np.zeros_like(values)
    dispatch.rope_shift(values.view(np.uint8), out.view(np.uint8), *rotation)
    with np.errstate(invalid="ignore"):
        reference.rope_shift(values.view(np.uint8), expected.view(np.uint8), *rotation)
    assert out[0, 0] > 0
    assert np.isfinite(out[1, block:]).all()
    assert np.isfinite(out[2, :block]).all()
    assert np.array_equal(out, expected, equal_nan=True)
    assert same(out[3:], transform(transform(values[3:], block), block))
