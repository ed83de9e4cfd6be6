"""The Walsh-Hadamard transform in numpy."""

from __future__ import annotations

import math

import numpy as np

from towerd.kernels.arrays import Floats


def transform(values: Floats, block: int) -> Floats:
    """`values`, float32[n, d], with each run of `block` elements (a power of two) times the
    Walsh-Hadamard matrix / sqrt(block). Numbers are scaled first and then added at distance 1, 2, 4 ...,
    as ggml's CPU operation does (ggml-cpu/ops.cpp, fwht), so the result is the same to the bit."""
    n, d = values.shape
    scale = np.float32(1) / np.float32(math.sqrt(block))
    x = values * scale
    distance = 1
    while distance < block:
        pairs = x.reshape(n, d // (2 * distance), 2, distance)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack((a + b, a - b), axis=2).reshape(n, d)
        distance *= 2
    return x
