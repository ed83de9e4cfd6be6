"""Several estimates of the next step from remembered steps, each one of PARTS.

markov1-3: counts of what followed the same names, with back-off (Witten-Bell), as in markov.py.
copy, recent: what followed the same name earlier in this very workflow, and who acted of late;
the only parts that can name an agent that training has not seen.
names, words: kernel ridge regression on what came next, by names alone, and by names and words
(Saunders et al. 1998): every voter votes as much as the present step is like it.
graph: PBKV's model, see graph.py.
Scores of a part need not sum to one; `mixture.py` weighs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from towerd.policy.predict.base import N_STEPS
from towerd.policy.predict.steps import Step, Steps, likeness

Scores: TypeAlias = NDArray[np.float32]
"""[N_STEPS, outcomes]."""
PARTS = ("markov1", "markov2", "markov3", "copy", "recent", "names", "words", "graph")
N_MARKOV = 3
_COPY_MEMORY = 0.9
_COPY_PRIOR = 1.0
"""How often something has to follow a name before half of the trust is in copying it."""


@dataclass(frozen=True)
class Memory:
    """keys: uint64 [n, N_ORDERS] and outcomes: int32 [n, N_STEPS] of all steps; voters: some of
    them, with their words; votes: float32 [ways, voters, N_STEPS * outcomes], by names, and
    where there are words, by names and words."""

    keys: NDArray[np.uint64]
    outcomes: NDArray[np.int32]
    voters: Steps
    votes: NDArray[np.float32]

    @property
    def n_ways(self) -> int:
        """2 where words were learned from."""
        return len(self.votes)

    def voted(self, step: Step, *, words: bool) -> Scores:
        """The part `words` or `names`."""
        votes = likeness(step, self.voters, words=words) @ self.votes[int(words)]
        out: Scores = votes.reshape(N_STEPS, -1)
        return out


def counted(
    step: Step, keys: NDArray[np.uint64], outcomes: NDArray[np.int32], every: Scores
) -> tuple[list[Scores], bool]:
    """The parts markov1, 2, ..., and whether the last name was ever seen. keys, outcomes: of the
    steps to count; every: how often each outcome came among them."""
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
    """How often each outcome came; outcomes: [n, N_STEPS], those below 0 do not count."""
    out = np.zeros((N_STEPS, n_outcomes), np.float32)
    for k in range(N_STEPS):
        column = outcomes[:, k]
        out[k] = np.bincount(column[column >= 0], minlength=n_outcomes)
    return out


def copied(path: Sequence[str], columns: Mapping[str, int], n_columns: int) -> list[Scores]:
    """The parts `copy` and `recent`; columns: of all names of the path."""
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
