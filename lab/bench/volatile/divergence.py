"""How far a served distribution of the next token is from the exact one, of the most probable tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

TopTokens: TypeAlias = Mapping[int, float]
"""Token ids with their log-probabilities, the most probable tokens alone."""
_REST_MIN = 1e-7
"""What rounding leaves of a rest that is nothing."""


def kl_nats(reference: TopTokens, served: TopTokens) -> float:
    """KL(reference || served) over the tokens that both name, and one bucket for all others: a lower bound
    of the divergence over the vocabulary, 0 for equal ones."""
    shared = reference.keys() & served.keys()
    found = sum(math.exp(reference[i]) * (reference[i] - served[i]) for i in shared)
    rest, rest_served = (_rest(each, shared) for each in (reference, served))
    return max(0.0, found + rest * math.log(rest / rest_served))


def _rest(tokens: TopTokens, shared: frozenset[int] | set[int]) -> float:
    return max(_REST_MIN, 1 - sum(math.exp(tokens[i]) for i in shared))


@dataclass(frozen=True, slots=True)
class ReplyDrift:
    """KL divergences from the reference, an exact evaluation, for each token of a reply."""

    served: Sequence[float]
    noise: Sequence[float]
    """Of another exact evaluation, in batches of other shapes."""

    @classmethod
    def of(
        cls, reference: Sequence[TopTokens], served: Sequence[TopTokens], other: Sequence[TopTokens]
    ) -> ReplyDrift:
        """All three are of the same tokens. Raises ValueError unless they are as long."""
        found = list(zip(reference, served, other, strict=True))
        return cls([kl_nats(p, q) for p, q, _ in found], [kl_nats(p, r) for p, _, r in found])


def mean_excess(replies: Sequence[ReplyDrift]) -> float:
    """What the served tokens of all replies have over the noise, nats a token; 0 without any token."""
    more = [a - b for each in replies for a, b in zip(each.served, each.noise, strict=True)]
    return float(np.mean(more)) if more else 0.0
