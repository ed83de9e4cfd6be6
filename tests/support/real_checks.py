"""Checks of a trained model's reply.

Quantized weights make a model amplify rounding: a text in batches of other sizes gets other
distributions. So a reply is compared with prefill in the very same batches, and then to the bit;
or, where it shared its batches with others, within what other batches change by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from oracle import Answer, Logits, Oracle, TokenProbs, inside, token_probs
from services import EmbeddedService

from towerd.tokens import Ids

ROUNDING = 1e-3
"""llama.cpp's own softmax adds 49,152 probabilities up in 32 bits, which loses the small ones: 1e-4 of
a log-probability. Other batches change it by up to 0.3."""
EXACT: dict[str, Any] = {
    "fidelity": "exact",
    "flash_attn": "on",
    "threads": 1,
    "ctx_size": 2048,
    "live_tokens": 8192,
}
"""Settings under which a reply in the same batches has the same bits. Without flash attention where
the cells lie decides how sums are rounded, and how many are in use, in steps of 256, decides how
the threads share them."""


@dataclass(frozen=True, slots=True)
class Said:
    """The tokens of a reply and what was reported of each."""

    ids: Sequence[int]
    probs: Sequence[TokenProbs]


def said(reply: Mapping[str, Any]) -> Said:
    """Those of an unstreamed /completion with `return_tokens` and `n_probs`."""
    return Said(reply["tokens"], token_probs(reply))


async def ids_of(service: EmbeddedService, text: str, *, begins: bool = False) -> Ids:
    """`begins`: with what the model wants at the beginning of a text."""
    return await service.engine.tokenize(text, add_special=begins, parse_special=True)


def joined(*parts: Sequence[int] | Ids) -> Ids:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


async def drop_live(service: EmbeddedService) -> None:
    """Nothing is live any more; what was is in the store."""

    def drop() -> None:
        for seq in list(service.engine.pool):
            service.engine.pool.drop(seq)

    await inside(service, drop)


def check_bits(oracle: Oracle, prompt: Ids, sizes: Sequence[int], answer: Answer | Said) -> None:
    """The reply is that of a prefill in batches of these sizes, to the bit, and greedy."""
    check_rows(oracle, in_batches(oracle, prompt, sizes, answer), answer)


def check_rows(oracle: Oracle, expected: Logits, answer: Answer | Said) -> None:
    """The same, of log-probabilities that are known already."""
    assert len(answer.ids) == len(answer.probs) == len(expected)
    for row, probs, token in zip(expected, answer.probs, answer.ids, strict=True):
        assert probs.id == token
        assert token == int(np.argmax(_allowed(oracle, row)))
        for each, logprob in {**probs.top, token: probs.logprob}.items():
            assert abs(logprob - row[each]) <= ROUNDING, (each, logprob, row[each])


def in_batches(oracle: Oracle, prompt: Ids, sizes: Sequence[int], answer: Answer | Said) -> Logits:
    """The log-probabilities where the reply's tokens stand; sum(sizes) is the prompt's length."""
    assert sum(sizes) == len(prompt)
    whole = joined(prompt, answer.ids[:-1])
    return oracle.logprobs_in(whole, len(prompt) - 1, sizes)


def divergence(expected: Logits, probs: Sequence[TokenProbs]) -> float:
    """Mean KL divergence of a reply's distributions from the expected ones, over the tokens that
    were reported and one for all others."""
    each = []
    for row, found in zip(expected, probs, strict=True):
        reported = {**found.top, found.id: found.logprob}
        q = np.exp([reported[token] for token in reported])
        p = np.exp([row[token] for token in reported])
        p, q = np.append(p, max(1e-9, 1 - p.sum())), np.append(q, max(1e-9, 1 - q.sum()))
        each.append(float(np.sum(p * np.log(p / q))))
    return math.fsum(each) / len(each)


def noise(oracle: Oracle, prompt: Ids, sizes: Sequence[int], answer: Answer | Said) -> float:
    """The divergence that the model has from itself in other batches: the reply in one with the
    last of these instead of one token after the other, or what comes before that in pieces of 64.
    The larger of both: on some processors one of them rounds alike, and is zero."""
    expected = in_batches(oracle, prompt, sizes, answer)
    n_before = len(prompt) - sizes[-1]
    pieces = [min(64, n_before - at) for at in range(0, n_before, 64)]
    n_replied = len(answer.ids) - 1
    return max(
        _self_divergence(oracle, prompt, [*sizes[:-1], sizes[-1] + n_replied], answer, expected),
        _self_divergence(oracle, prompt, [*pieces, sizes[-1]], answer, expected),
    )


def _self_divergence(
    oracle: Oracle,
    prompt: Ids,
    sizes: Sequence[int],
    answer: Answer | Said,
    expected: Logits,
) -> float:
    rows = oracle.logprobs_in(joined(prompt, answer.ids[:-1]), len(prompt) - 1, sizes)
    probs = [
        TokenProbs(each.id, float(row[each.id]), {token: float(row[token]) for token in each.top})
        for row, each in zip(rows, answer.probs, strict=True)
    ]
    return divergence(expected, probs)


def divergence_in(
    oracle: Oracle, prompt: Ids, sizes: Sequence[int], answer: Answer | Said
) -> float:
    """The divergence of the reply from a prefill in batches of these sizes."""
    return divergence(in_batches(oracle, prompt, sizes, answer), answer.probs)


def _allowed(oracle: Oracle, row: np.ndarray) -> np.ndarray:
    """Requests here ignore what ends a reply."""
    row = row.copy()
    row[oracle.forbidden] = -np.inf
    return row
