"""The trained part of `mix`: its start before any data, and its training on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

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

I32 = npt.NDArray[np.int32]
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


Foretold: TypeAlias = Callable[[I32], Iterable[U32]]
"""A network's distribution by rank before each of a session's tokens: uint32[n_tokens]."""


def trained(
    make: Callable[[U32], Mixer], state: U32, sessions: Sequence[I32],
    foretold: Foretold | None = None,
) -> Iterator[tuple[U32, float]]:  # fmt: skip
    """Learn one session after the other; yields (state, bits per token of that session)."""
    for ranks in sessions:
        mixer = make(state)
        mixer.reset(1, _TABLE_BITS)
        if foretold is None:
            cost = bits_of(*mixer.encode(0, ranks))
        else:
            each = zip(np.split(ranks, len(ranks)), foretold(ranks), strict=True)
            cost = sum(bits_of(*mixer.encode(0, rank, counts)) for rank, counts in each)
        state = mixer.state()
        yield state, cost / max(1, len(ranks))


def bits_of(decisions: I32, chances: npt.NDArray[np.float64]) -> float:
    """What decisions cost whose probabilities of 1 were `chances`."""
    return float(-np.log2(np.where(decisions == 1, chances, 1 - chances)).sum())
