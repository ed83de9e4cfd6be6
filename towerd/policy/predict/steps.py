"""Remembered steps of workflows, and the similarity of a step to each of them.

A step is described by its contexts, the last 1 to N_ORDERS names of its path, and by two vectors of
words: what was said last, and everything that was said, older words counting less. Likeness is a
kernel: 1, plus 1 for every equal context, plus the cosines of the words and their squares, which
count twice if the names are equal (a linear model of contexts, words, pairs of words, and all of
these by name).

Remembered steps give several estimates of the next one, one for each of PARTS:
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
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from towerd.policy.predict.base import N_STEPS

Vector: TypeAlias = NDArray[np.float32]
N_TEXT = 384
"""Length of the embedding of a step's words, [N_TEXT]: `lab` trains with hashed ones. The daemon's
policies see names alone."""
N_ORDERS = 4
NONE = -1
"""The outcome beyond the end of a workflow."""
_TALK_MEMORY = 0.6
_TALK_STEPS = 16
"""Steps whose words count; earlier ones have almost no weight."""
_WORDS_WEIGHT = 3.0
_SEPARATOR, _START = "\x1f", "\x02"
Scores: TypeAlias = NDArray[np.float32]
"""[N_STEPS, outcomes]."""
PARTS = ("markov1", "markov2", "markov3", "copy", "recent", "names", "words", "graph")
N_MARKOV = 3
_COPY_MEMORY = 0.9
_COPY_PRIOR = 1.0
"""How often something must follow a name before copying it gets half of the weight."""


class StepFeatures(NamedTuple):
    """keys: uint64 [N_ORDERS], hashes of the contexts, padded with a start symbol; said, talk:
    float32 [N_TEXT] of length 1, or zeros if unknown."""

    keys: NDArray[np.uint64]
    said: Vector
    talk: Vector


@dataclass(frozen=True, slots=True)
class Steps:
    """n steps. keys: uint64 [n, N_ORDERS]; said, talk: float32 [n, N_TEXT]; outcomes: int32
    [n, N_STEPS], the outcome numbers 1, 2, ... steps later, or NONE."""

    keys: NDArray[np.uint64]
    said: NDArray[np.float32]
    talk: NDArray[np.float32]
    outcomes: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, rows: Any) -> Steps:
        return Steps(self.keys[rows], self.said[rows], self.talk[rows], self.outcomes[rows])


def step(path: Sequence[str], meanings: Sequence[Vector]) -> StepFeatures:
    """The features of the last step of a non-empty path. meanings: the embeddings of all its
    steps, or none."""
    padded = [_START] * (N_ORDERS - len(path)) + list(path[-N_ORDERS:])
    keys = np.empty(N_ORDERS, np.uint64)
    for n in range(1, N_ORDERS + 1):
        context = _SEPARATOR.join(padded[-n:]).encode("utf-8", "surrogatepass")
        keys[n - 1] = xxhash.xxh64_intdigest(context, seed=n)
    if not len(meanings):
        return StepFeatures(keys, np.zeros(N_TEXT, np.float32), np.zeros(N_TEXT, np.float32))
    recent = np.stack(list(meanings[-_TALK_STEPS:]))
    shares = _TALK_MEMORY ** np.arange(len(recent) - 1, -1, -1, dtype=np.float32)
    talk: Vector = (shares @ recent).astype(np.float32)
    norm = float(np.linalg.norm(talk))
    return StepFeatures(keys, recent[-1], talk / np.float32(norm) if norm else talk)


def likeness(a: Steps | StepFeatures, b: Steps, *, words: bool) -> NDArray[np.float32]:
    """The kernel: float32 [steps of a, steps of b], or [steps of b] for a single step. words:
    whether to compare the words, too."""
    keys, said, talk = a.keys, a.said, a.talk
    same = keys[..., None, 0] == b.keys[:, 0]
    out: NDArray[np.float32] = same.astype(np.float32) + np.float32(1)
    for n in range(1, N_ORDERS):
        out += keys[..., None, n] == b.keys[:, n]
    if words:
        for cosines in (said @ b.said.T, talk @ b.talk.T):
            out += (cosines + cosines**2) * (_WORDS_WEIGHT * (same + np.float32(1)))
    return out


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
