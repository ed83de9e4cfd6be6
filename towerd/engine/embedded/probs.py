"""Token probabilities as llama-server reports them (`n_probs`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from towerd.engine.base import TokenProb, TokenProbs
from towerd.engine.embedded.vocab import Vocab

Floats = npt.NDArray[np.float32]
LOGPROB_MIN = float(np.finfo(np.float32).min)
"""Stands for log 0, which JSON cannot carry."""


def from_logits(vocab: Vocab, logits: Floats, chosen: int, n_probs: int) -> TokenProbs:
    """Before sampling: softmax of the raw logits, float32[n_vocab], and its `n_probs` best."""
    peak = logits.max()
    log_sum = float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    n = min(n_probs, len(logits))
    best = np.argpartition(logits, len(logits) - n)[len(logits) - n :]
    # Stable on the negated logits: of equals the lower id comes first.
    best = np.sort(best)
    best = best[np.argsort(-logits[best], kind="stable")]

    def prob(token: int) -> TokenProb:
        logprob = max(float(logits[token]) - float(peak) - log_sum, LOGPROB_MIN)
        return TokenProb(token, vocab.rendered(token), logprob)

    return TokenProbs(prob(chosen), tuple(prob(int(i)) for i in best))


def from_candidates(
    vocab: Vocab, ids: npt.NDArray[np.int32], p: Floats, chosen: int, n_probs: int
) -> TokenProbs:
    """After sampling: `p` float32[n] of the candidates `ids` int32[n] that the chain left.

    Candidates of probability 0 are not reported."""

    def prob(token: int, value: float) -> TokenProb:
        logprob = max(float(np.log(value)), LOGPROB_MIN) if value > 0 else LOGPROB_MIN
        return TokenProb(token, vocab.rendered(token), logprob)

    order = np.argsort(-p, kind="stable")[:n_probs]
    top = tuple(prob(int(ids[i]), float(p[i])) for i in order if p[i] > 0)
    at = np.flatnonzero(ids == chosen)
    return TokenProbs(prob(chosen, float(p[at[0]]) if len(at) else 0.0), top)
