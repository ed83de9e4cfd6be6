"""The trained part of `mix` before any data, and what its decisions cost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from towerd.kernels.mixing import (
    DYNAMIC,
    FINAL,
    LEVELS,
    MATCH_MAX,
    MATCHES,
    SETS,
    STATIC,
    state_size,
)

I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]


def untrained(n_tokens: int) -> U32:
    """uint32[state_size(n_tokens)]: maps that take counts at face value, and equal weights."""
    level = np.array([n if n < 5 else 2 + ((n - 5) & 1) << (n - 5) // 2 + 1 for n in range(LEVELS)])
    zeros, ones = level[:, None].astype(float), level[None, :].astype(float)
    static = ((ones + 0.4) / (zeros + ones + 0.8)).reshape(-1)
    pair = np.arange(256)
    dynamic = ((pair & 15) + 0.4) / ((pair >> 4) + (pair & 15) + 0.8)
    length = np.arange(MATCH_MAX)
    right = 1 - 0.5 / (length + 2)
    match = np.stack([1 - right, right], axis=1).reshape(-1)
    chances = [np.full(n_tokens, 0.5), *[static] * STATIC, *[dynamic] * DYNAMIC, *[match] * MATCHES]
    maps = (np.concatenate(chances) * ((1 << 22) - 1)).astype(np.uint32) << np.uint32(10)
    n_last = FINAL * SETS
    inputs = np.full(state_size(n_tokens) - len(maps) - n_last, 1 << 14, np.uint32)
    return np.concatenate([maps, inputs, np.full(n_last, 66000 // SETS, np.uint32)])


def bits_of(decisions: I32, chances: npt.NDArray[np.float64]) -> float:
    """Bits that decisions cost if their probabilities of being 1 were `chances`."""
    return float(-np.log2(np.where(decisions == 1, chances, 1 - chances)).sum())
