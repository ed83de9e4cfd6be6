"""The text of a module (`reuse: anywhere`), and its tokens independent of the text around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from towerd.errors import InvalidRequest
from towerd.tokens import Ids, common_prefix

PREFIX, ANYWHERE = "prefix", "anywhere"
"""The values of `reuse`: where a base may stand in a prompt."""
TOKENS_MIN = 32
"""A shorter text is not worth a splice."""
PERCENT_DEFAULT = 5.0
"""Minimum percentage of a module's tokens that is evaluated again at each splice."""
PERCENTS_MORE = (5.0, 15.0, 25.0, 50.0, 75.0)
"""Larger percentages, tried in order until the drift stays within the fidelity's bound."""
PERCENT_MAX = 99.0
"""More would leave nothing to splice."""

BEFORE = ("\n", "\n\n", " ", ": ", ">", '"')
AFTER = ("\n", "\n\n", " ", ".", "<", '"')
"""Texts that a module's text may stand between; see `surrounded`."""


def surrounded(text: str) -> list[str]:
    """The texts to tokenize (without BOS, special tokens parsed) for `inner_ids`: the module's
    text alone, then after each of BEFORE, then before each of AFTER."""
    return [text, *(before + text for before in BEFORE), *(text + after for after in AFTER)]


def inner_ids(tokenized: Sequence[Any]) -> Ids:
    """The ids of a module that do not depend on the text around it, from the ids of
    `surrounded(text)`.

    Tokenizers merge across joints, and some put a space before every text. Tokens at the ends
    that depend on their neighbours are left out; a prompt evaluates them anew.
    Raises InvalidRequest if fewer than TOKENS_MIN are left."""
    alone, *others = (np.asarray(ids, np.int32) for ids in tokenized)
    n_last = min(common_prefix(alone[::-1], each[::-1]) for each in others[: len(BEFORE)])
    n_first = min(common_prefix(alone, each) for each in others[len(BEFORE) :])
    found = alone[len(alone) - n_last : n_first]
    check_length(len(found))
    return np.ascontiguousarray(found)


def check_length(n: int) -> None:
    """Raises InvalidRequest if a module of `n` tokens is too short."""
    if n < TOKENS_MIN:
        raise InvalidRequest(
            f"A module needs at least {TOKENS_MIN} tokens that do not depend on the text around "
            f"it; this one has {n}."
        )
