"""Several estimates of the next step from remembered steps, one for each of PARTS.

markov1-3: counts of what followed the same names, with back-off (Witten-Bell), as in markov.py.
copy, recent: what followed the same name earlier in this workflow, and which agents acted recently;
the only parts that can predict an agent unseen in training.
names, words: kernel ridge regression on what came next, by names alone, and by names and words
(Saunders et al. 1998): each remembered step votes in proportion to its likeness to the present one.
graph: PBKV's model, see graph.py.
The scores of a part need not sum to one; `mixture.py` weights them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from towerd.policy.predict.base import N_STEPS
from towerd.policy.predict.steps import StepFeatures, Steps, likeness

Scores: TypeAlias = NDArray[np.float32]
"""[N_STEPS, outcomes]."""
PARTS = ("markov1", "markov2", "markov3", "copy", "recent", "names", "words", "graph")
N_MARKOV = 3
_COPY_MEMORY = 0.9
_COPY_PRIOR = 1.0
"""How often something must follow a name before copying it gets half of the weight."""


@dataclass(frozen=True)
class StepMemory:
    """Remembered steps. keys: uint64 [n, N_ORDERS] and outcomes: int32 [n, N_STEPS] of all steps;
    voters: some of them, with their words; votes: float32 [ways, voters, N_STEPS * outcomes], by
    names, and, if there are words, by names and words."""

    keys: NDArray[np.uint64]
    outcomes: NDArray[np.int32]
    voters: Steps
    votes: NDArray[np.float32]

    @property
    def n_ways(self) -> int:
        """2 if it was trained with words, else 1."""
        return len(self.votes)

    def voted(self, step: StepFeatures, *, words: bool) -> Scores:
        """Scores of the part `words` or `names`."""
        votes = likeness(step, self.voters, words=words) @ self.votes[int(words)]
        out: Scores = votes.reshape(N_STEPS, -1)
        return out


def counted(
    step: StepFeatures, keys: NDArray[np.uint64], outcomes: NDArray[np.int32], every: Scores
) -> tuple[list[Scores], bool]:
    """Scores of the parts markov1, 2, ..., and whether the last name was ever seen. keys, outcomes:
    of the steps to count; every: how often each outcome occurred among them."""
    mixed = every / np.maximum(every.sum(1, keepdims=True), 1.0)
    out: list[Scores] = []
    rows = np.flatnonzero(keys[:, 0] == step.keys[0])
    is_known = len(rows) > 0
    for n in range(N_MARKOV):
        if n:
            rows = rows[keys[rows, n] == step.keys[n]]
        counts = tally(outcomes[rows], every.shape[1])
        n_seen, n_kinds = counts.sum(1, keepdims=True), (counts > 0).sum(1, keepdims=True)
        whole = np.maximum(n_seen + n_kinds, 1.0)
        mixed = np.where(n_seen > 0, (mixed * n_kinds + counts) / whole, mixed)
        out.append(mixed.astype(np.float32))
    return out, is_known


def tally(outcomes: NDArray[np.int32], n_outcomes: int) -> Scores:
    """How often each outcome occurred. outcomes: [n, N_STEPS]; negative ones are not counted."""
    out = np.zeros((N_STEPS, n_outcomes), np.float32)
    for k in range(N_STEPS):
        column = outcomes[:, k]
        out[k] = np.bincount(column[column >= 0], minlength=n_outcomes)
    return out


def copied(path: Sequence[str], columns: Mapping[str, int], n_columns: int) -> list[Scores]:
    """Scores of the parts `copy` and `recent`. columns: the outcome number of every name of the
    path."""
    codes = np.array([columns[name] for name in path], np.int64)
    weights = _COPY_MEMORY ** np.arange(len(codes) - 1, -1, -1, dtype=np.float32)
    acted = np.bincount(codes, weights, n_columns)
    recent = (acted / acted.sum())[None].repeat(N_STEPS, 0)
    copy = np.zeros((N_STEPS, n_columns))
    for k in range(N_STEPS):
        came = np.flatnonzero(codes[: max(0, len(codes) - 1 - k)] == codes[-1])
        copy[k] = np.bincount(codes[came + 1 + k], weights[came], n_columns)
    copy /= copy.sum(1, keepdims=True) + _COPY_PRIOR
    return [copy.astype(np.float32), recent.astype(np.float32)]
