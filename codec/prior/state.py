"""The trained part of `mix`: its start before any data, and its training on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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
    Mixer,
    n_maps,
    state_size,
)

U32 = npt.NDArray[np.uint32]

SESSION_TOKENS = 4400
"""Training text is learned in pieces of about 16 KB, as if each were a session."""
COUNT_MAX = 255
"""A map that has seen more forgets faster from here on: sessions differ from the corpus."""
_TABLE_BITS = 18


def untrained(n_tokens: int) -> U32:
    """uint32[mixer_state_size]: maps that believe the counts, weights that trust all alike."""
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


def capped(state: U32, n_tokens: int) -> U32:
    """The state with the counts of its maps at COUNT_MAX."""
    n = n_maps(n_tokens)
    maps = state[:n]
    few = np.minimum(maps & np.uint32(1023), np.uint32(COUNT_MAX))
    return np.concatenate([maps & ~np.uint32(1023) | few, state[n:]])


def trained(
    make: Callable[[U32], Mixer], state: U32, sessions: Sequence[npt.NDArray[np.int32]]
) -> Iterator[tuple[U32, float]]:
    """Learn one session after the other; yields (state, bits per token of that session)."""
    for ranks in sessions:
        mixer = make(state)
        mixer.reset(1, _TABLE_BITS)
        bits, chances = mixer.encode(0, ranks)
        state = mixer.state()
        cost = -np.log2(np.where(bits == 1, chances, 1 - chances)).sum()
        yield state, float(cost) / max(1, len(ranks))
