"""The Walsh-Hadamard transform in numpy."""

from __future__ import annotations

import math

import numpy as np

from towerd.kernels.arrays import Floats
from towerd.kernels.mlx import arguments


def hadamard(src: Floats, out: Floats, block: int, n_threads: int = 1) -> None:
    """See `dispatch.hadamard`."""
    source, target = checked_hadamard(src, out, block, n_threads)
    target[:] = transform(source, block)


def checked_hadamard(src: Floats, out: Floats, block: int, n_threads: int) -> tuple[Floats, Floats]:
    """Both arrays; ValueError if `hadamard` must not be called with these."""
    arguments.check_threads(n_threads)
    source = arguments.rows_of(src, "src", np.float32)
    target = arguments.rows_of(out, "out", np.float32, writable=True)
    for array, name in ((source, "src"), (target, "out")):
        if not array.flags.aligned:
            raise ValueError(f"{name}: not aligned")
    arguments.check_out(source, target)
    arguments.check_block(block, "block")
    if source.shape[1] % block:
        raise ValueError(f"block: {block} does not divide rows of {source.shape[1]}")
    return source, target


def transform(values: Floats, block: int) -> Floats:
    """`values`, float32[n, d], with each run of `block` elements transformed."""
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
