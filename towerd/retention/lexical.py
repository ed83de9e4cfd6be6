"""Which positions of a chat the words of its last message are about: a ranking of passages by rare words
they share with it (BM25 without lengths, since all passages are equally long), for what attention alone
does not find again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from towerd.retention.base import Mass, Positions

PASSAGE_TOKENS = 32
"""Words this close to each other count together."""
_PAIR_BONUS = 2.0
"""What a token counts more whose predecessor is the same in the message."""
_COMMON = 64
"""A token that is every _COMMON-th or more of the chat's counts nothing."""
_SCORE_MIN = 2.0
"""Passages below it are left out: a word that occurs once in a thousand tokens has 2."""


def passages(ids: npt.NDArray[np.int32], n_asked: int, n_max: int) -> Positions:
    """int64[at most n_max], ascending: the positions of the passages that share most with the last
    `n_asked` of these tokens, before them, best first until they are too many."""
    n = len(ids) - n_asked
    if n <= 0 or n_asked <= 0 or n_max < PASSAGE_TOKENS:
        return np.empty(0, np.int64)
    weights = _weights(ids, n)
    sums = np.concatenate([[0], np.cumsum(weights, dtype=np.float64)])
    starts = np.arange(0, n, PASSAGE_TOKENS // 2)
    stops = np.minimum(starts + PASSAGE_TOKENS, n)
    scores = sums[stops] - sums[starts]
    chosen = np.zeros(n, np.bool_)
    for i in np.argsort(-scores, kind="stable").tolist():
        if scores[i] < _SCORE_MIN:
            break
        wanted = chosen.copy()
        # What is asked for often stands just behind the words that are named.
        wanted[starts[i] : stops[i] + PASSAGE_TOKENS // 2] = True
        if wanted.sum() > n_max:
            break
        chosen = wanted
    return np.flatnonzero(chosen).astype(np.int64)


def _weights(ids: npt.NDArray[np.int32], n: int) -> Mass:
    """float32[n]: what each token counts, more if it is rare; 0 if the message does not have it."""
    before, asked = ids[:n], ids[n:]
    counts = np.bincount(before[before >= 0], minlength=int(max(asked.max(), 0)) + 1)
    there = np.isin(before, asked) & (before >= 0)
    rarity = np.log((n + 1) / (counts[np.maximum(before, 0)] + 1)) - np.log(_COMMON)
    weights = np.where(there, np.maximum(rarity, 0), 0)
    pairs = (asked[:-1].astype(np.int64) << 32) | asked[1:]
    mine = (before[:-1].astype(np.int64) << 32) | before[1:]
    weights[1:] *= np.where(np.isin(mine, pairs), 1 + _PAIR_BONUS, 1)
    return weights.astype(np.float32)
