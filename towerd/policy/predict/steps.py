"""Remembered steps of workflows, and the similarity of a step to each of them.

A step is described by its contexts, the last 1 to N_ORDERS names of its path, and by two vectors of
words: what was said last, and everything that was said, older words counting less. Likeness is a
kernel: 1, plus 1 for every equal context, plus the cosines of the words and their squares, which
count twice if the names are equal (a linear model of contexts, words, pairs of words, and all of
these by name).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

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
