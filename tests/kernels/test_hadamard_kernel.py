"""hadamard: the matrix it stands for, the same bits everywhere, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_rows import numbers, same

from lab import reference
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
def test_is_the_matrix(kernels: str, block: int, n: int) -> None:
    """Each run times the Walsh-Hadamard matrix, which is its own inverse; equal to the bit."""
    values = numbers(n, 3 * block)
    out, back, expected = (np.full_like(values, np.nan) for _ in range(3))
    dispatch.hadamard(values, out, block)
    product = values.astype(np.float64).reshape(-1, block) @ _matrix(block)
    assert np.allclose(out.reshape(-1, block), product, rtol=0, atol=TOLERANCE * 40 * block**0.5)
    dispatch.hadamard(out, back, block)
    assert np.allclose(back, values, rtol=0, atol=TOLERANCE * 160)
    reference.hadamard(values, expected, block)
    assert same(out, expected)


def test_extremes(kernels: str) -> None:
    """Subnormal numbers keep their bits' worth; infinity and NaN stay in their own run."""
    values = numbers(4, 128)
    values[0] = 1e-41
    values[1, 3], values[2, 70] = np.inf, np.nan
    out, expected = np.zeros_like(values), np.zeros_like(values)
    dispatch.hadamard(values, out, 64)
    with np.errstate(invalid="ignore"):
        reference.hadamard(values, expected, 64)
    assert out[0, 0] > 0
    assert not np.isfinite(out[1, :64]).any()
    assert not np.isfinite(out[2, 64:]).any()
    assert np.isfinite(out[1, 64:]).all()
    assert np.isfinite(out[2, :64]).all()
    assert np.array_equal(out, expected, equal_nan=True)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_many_strided_rows(kernels: str, n_threads: int) -> None:
    """Rows apart in both arrays, several tasks."""
    wide = numbers(1500, 520)
    out = np.full((1500, 515), 7, np.float32)
    expected = np.zeros((1500, 512), np.float32)
    dispatch.hadamard(wide[:, :512], out[:, :512], 128, n_threads)
    reference.hadamard(wide[:, :512], expected, 128)
    assert np.array_equal(out[:, :512], expected)
    assert (out[:, 512:] == 7).all()


X = numbers(4, 64)
ODD = np.zeros(4 * 64 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(4, 64)
READ_ONLY = np.zeros((4, 64), np.float32)
READ_ONLY.flags.writeable = False
BAD: dict[str, tuple[str, Any, Any, Any, Any]] = {
    "src double": ("src", X.astype(np.float64), X * 0, 64, 1),
    "src bytes": ("src", X.view(np.uint8), X * 0, 64, 1),
    "src flat": ("src", X[0], X * 0, 64, 1),
    "src columns": ("src", numbers(4, 128)[:, ::2], X * 0, 64, 1),
    "src backwards": ("src", X[::-1], X * 0, 64, 1),
    "src unaligned": ("src", ODD, X * 0, 64, 1),
    "src none": ("src", None, X * 0, 64, 1),
    "out unaligned": ("out", X, ODD, 64, 1),
    "out read-only": ("out", X, READ_ONLY, 64, 1),
    "out short": ("out", X, X[:3] * 0, 64, 1),
    "out narrow": ("out", X, numbers(4, 32), 32, 1),
    "out is src": ("out", X, X, 64, 1),
    "block too small": ("block", X, X * 0, 16, 1),
    "block too large": ("block", X, X * 0, 1024, 1),
    "block odd": ("block", X, X * 0, 48, 1),
    "block beyond the row": ("block", X, X * 0, 128, 1),
    "block float": ("block", X, X * 0, 64.0, 1),
    "no threads": ("n_threads", X, X * 0, 64, 0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(kernels: str, name: str) -> None:
    """Every bad argument is named."""
    argument, src, out, block, n_threads = BAD[name]
    before = None if src is None else src.tobytes()
    with pytest.raises(ValueError, match=f"^{argument}: "):
        dispatch.hadamard(src, out, block, n_threads)
    assert src is None or src.tobytes() == before
