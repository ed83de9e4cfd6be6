"""Rows of any format for the kernels: with gaps, at odd addresses, with unusual numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lab.reference.transcode import encode
from towerd.kernels.formats import BY_NAME

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def at_odd_address(rows: Bytes, gap: int = 3) -> Bytes:
    """The same rows, `gap` bytes apart, the first one at an odd address."""
    n, row_bytes = rows.shape
    memory = np.full(n * (row_bytes + gap) + 2, 0xEE, np.uint8)
    start = 1 - memory.ctypes.data % 2
    apart = memory[start : start + n * (row_bytes + gap)].reshape(n, row_bytes + gap)
    apart[:, :row_bytes] = rows
    return apart[:, :row_bytes]


def numbers(n: int, n_elements: int, seed: int = 0) -> Floats:
    """float32[n, n_elements]: normal ones of several sizes, the last two rows zero and constant."""
    random = np.random.default_rng(seed)
    scale = random.choice([1e-6, 1e-3, 1.0, 40.0], (n, 1))
    values: Floats = (random.normal(size=(n, n_elements)) * scale).astype(np.float32)
    values[n - 1 :] = 0
    values[n - 2 : n - 1] = -0.75
    return values


def rows_of(name: str, n: int, n_elements: int, seed: int = 0) -> Bytes:
    """uint8[n, row_bytes] of `numbers` in that format."""
    return encode(BY_NAME[name], numbers(n, n_elements, seed))


def patterns(name: str, n: int, n_elements: int, seed: int = 0) -> Bytes:
    """Any bits, f16 and f32 infinities, NaNs and subnormal numbers among them."""
    random = np.random.default_rng(seed)
    row_bytes = BY_NAME[name].row_bytes(n_elements)
    rows: Bytes = random.integers(0, 256, (n, row_bytes), np.uint8)
    return rows


def same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """The same bytes."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()
