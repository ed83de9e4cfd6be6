"""Training the maps and weights of a mixer on text that its tables did not count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from towerd.codec.models.base import TokenPredictor
from towerd.codec.prior.file import Prior
from towerd.codec.prior.state import I32, U32, bits_of
from towerd.kernels._native import Mixer
from towerd.kernels.mixing import n_maps

SESSION_TOKENS = 4400
"""Training text is learned in pieces of about 16 KB, each as a session of its own."""
COUNT_MAX = 255
"""Counts of maps are capped at this, so that they adapt faster: sessions differ from the corpus."""
_TABLE_BITS = 18


def capped(state: U32, n_tokens: int) -> U32:
    """The state with the counts of its maps at COUNT_MAX."""
    n = n_maps(n_tokens)
    maps = state[:n]
    few = np.minimum(maps & np.uint32(1023), np.uint32(COUNT_MAX))
    return np.concatenate([maps & ~np.uint32(1023) | few, state[n:]])


NetworkCounts: TypeAlias = Callable[[I32], Iterable[U32]]
"""A network's distribution by rank before each of a session's tokens: uint32[n_tokens]."""


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


def counts_of(predictor: TokenPredictor, prior: Prior) -> NetworkCounts:
    """The distributions of a model of the prior's tokens, one session after the other."""

    def counts(ranks: I32) -> Iterator[U32]:
        ids = [prior.controls[0], *prior.ids[ranks[:-1]].tolist()]
        predictor.reset()
        for at in range(0, len(ids), predictor.window):
            for each in predictor.feed([(0, id) for id in ids[at : at + predictor.window]]):
                yield each[prior.ids]

    return counts
