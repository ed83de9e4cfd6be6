"""transpose: token-major to channel-major and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from towerd.kernels import dispatch

TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}
SIZES = [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65]


@pytest.mark.parametrize("element_bytes", TYPES)
@pytest.mark.parametrize("n", SIZES)
def test_tails(kernels: str, element_bytes: int, n: int) -> None:
    """Every shape around the tile size, out and back."""
    for columns in (1, 31, 32, 33, n, 65):
        matrix = np.random.default_rng(n).integers(0, 1 << 31, (n, columns))
        matrix = matrix.astype(TYPES[element_bytes])
        out = np.zeros((columns, n * element_bytes), np.uint8)
        dispatch.transpose(matrix.view(np.uint8), out, element_bytes)
        assert np.array_equal(out, np.ascontiguousarray(matrix.T).view(np.uint8))
        back = np.zeros((n, columns * element_bytes), np.uint8)
        dispatch.transpose(out, back, element_bytes)
        assert np.array_equal(back, matrix.view(np.uint8))


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_ranges_of_wider_rows(kernels: str, n_threads: int) -> None:
    """Source and target may be column ranges; the bytes beside them stay."""
    source = np.random.default_rng(3).integers(0, 256, (900, 2000), np.uint8)
    out = np.full((500, 4000), 7, np.uint8)
    dispatch.transpose(source[:, 100:1100], out[:, 200:2000], 2, n_threads)
    expected = np.ascontiguousarray(np.ascontiguousarray(source[:, 100:1100]).view(np.uint16).T)
    assert np.array_equal(out[:, 200:2000], expected.view(np.uint8))
    assert (out[:, :200] == 7).all()
    assert (out[:, 2000:] == 7).all()


def test_empty(kernels: str) -> None:
    """No rows, no columns."""
    dispatch.transpose(np.empty((0, 8), np.uint8), np.empty((4, 0), np.uint8), 2)
    dispatch.transpose(np.empty((3, 0), np.uint8), np.empty((0, 6), np.uint8), 2)


SRC = np.zeros((4, 8), np.uint8)
BAD: dict[str, tuple[str, Any, Any, Any]] = {
    "element 3": ("element_bytes", SRC, np.zeros((4, 8), np.uint8), 3),
    "element 8": ("element_bytes", SRC, np.zeros((1, 32), np.uint8), 8),
    "element 0": ("element_bytes", SRC, np.zeros((4, 8), np.uint8), 0),
    "half elements": ("src", np.zeros((4, 6), np.uint8), np.zeros((1, 16), np.uint8), 4),
    "src of words": ("src", np.zeros((4, 4), np.uint16), np.zeros((4, 8), np.uint8), 2),
    "src columns": ("src", np.zeros((4, 16), np.uint8)[:, ::2], np.zeros((4, 8), np.uint8), 2),
    "out shape": ("out", SRC, np.zeros((8, 4), np.uint8), 2),
    "out bytes": ("out", SRC, b"1234", 2),
    "out is src": ("out", SRC, SRC, 2),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(kernels: str, name: str) -> None:
    """Every bad argument is named."""
    argument, src, out, element_bytes = BAD[name]
    with pytest.raises(ValueError, match=f"^{argument}: "):
        dispatch.transpose(src, out, element_bytes)
