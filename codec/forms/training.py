"""The maps and weights of a mixer: before any data, and trained on text that its tables did not
count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.codec.models.exact import ExactPredictor
from towerd.codec.prior.file import I32, U32, Prior
from towerd.kernels._native import Mixer, mixer_state_size
from towerd.kernels.mixing import (
    DYNAMIC,
    FINAL,
    LEVELS,
    MATCH_MAX,
    MATCHES,
    SETS,
    STATIC,
    n_maps,
)

COUNT_MAX = 255
"""Counts of maps are capped at this, so that they adapt faster: sessions differ from the corpus."""
_TABLE_BITS = 18


def untrained(n_tokens: int) -> U32:
    """uint32[mixer_state_size(n_tokens)]: maps that take counts at face value, and equal weights."""
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
    inputs = np.full(mixer_state_size(n_tokens) - len(maps) - n_last, 1 << 14, np.uint32)
    return np.concatenate([maps, inputs, np.full(n_last, 66000 // SETS, np.uint32)])


def capped(state: U32, n_tokens: int) -> U32:
    """The state with the counts of its maps at COUNT_MAX."""
    n = n_maps(n_tokens)
    maps = state[:n]
    few = np.minimum(maps & np.uint32(1023), np.uint32(COUNT_MAX))
    return np.concatenate([maps & ~np.uint32(1023) | few, state[n:]])


NetworkCounts: TypeAlias = Callable[[I32], Iterable[U32]]
"""A network's distribution by rank before each of a session's tokens: uint32[n_tokens]."""


def bits_of(decisions: I32, chances: npt.NDArray[np.float64]) -> float:
    """Bits that decisions cost if their probabilities of being 1 were `chances`."""
    return float(-np.log2(np.where(decisions == 1, chances, 1 - chances)).sum())


def trained(
    make: Callable[[U32], Mixer],
    state: U32,
    sessions: Sequence[I32],
    network_counts: NetworkCounts | None = None,
) -> Iterator[tuple[U32, float]]:
    """Learn the sessions one after the other; yields (state, bits per token of the session)."""
    for ranks in sessions:
        mixer = make(state)
        mixer.reset(1, _TABLE_BITS)
        if network_counts is None:
            cost = bits_of(*mixer.encode(0, ranks))
        else:
            each = zip(np.split(ranks, len(ranks)), network_counts(ranks), strict=True)
            cost = sum(bits_of(*mixer.encode(0, rank, counts)) for rank, counts in each)
        state = mixer.state()
        yield state, cost / max(1, len(ranks))


def counts_of(predictor: ExactPredictor, prior: Prior) -> NetworkCounts:
    """The distributions of a model of the prior's tokens, one session after the other."""

    def counts(ranks: I32) -> Iterator[U32]:
        ids = [prior.controls[0], *prior.ids[ranks[:-1]].tolist()]
        predictor.reset()
        for at in range(0, len(ids), predictor.window):
            for each in predictor.feed([(0, id) for id in ids[at : at + predictor.window]]):
                yield each[prior.ids]

    return counts
