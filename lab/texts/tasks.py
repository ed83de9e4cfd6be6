"""Retrieval tasks, which need a model that looks back: pass keys, key-value pairs, and copies.

Each is stated and asked in the same words, so that it is enough to find the place where those words
stood before. Nothing here needs torch: the evaluation asks the same of any model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DIGITS = "0123456789"
HEX = "0123456789abcdef"
N_DIGITS = 5
N_HEX = 4


@dataclass(frozen=True, slots=True)
class Fact:
    """`text` is stated somewhere in a context; after `question`, `answer` has to follow."""

    text: str
    question: str
    answer: str


def passkey(chance: np.random.Generator) -> Fact:
    """A number to remember, as in "Landmark Attention" (Mohtashami and Jaggi, 2023)."""
    key = spelled(chance, DIGITS, N_DIGITS)
    return Fact(f"\nThe pass key is {key}. Remember it.\n", "\nThe pass key is ", key)


def pair(key: str, value: str) -> Fact:
    """A line of a JSON object, as in "Lost in the Middle" (Liu and others, 2023)."""
    return Fact(f'"{key}": "{value}"\n', f'"{key}": "', value)


def random_pair(chance: np.random.Generator) -> Fact:
    """A pair of hexadecimal words."""
    return pair(spelled(chance, HEX, N_HEX), spelled(chance, HEX, N_HEX))


def spelled(chance: np.random.Generator, letters: str, n: int) -> str:
    """`n` random letters."""
    return "".join(letters[i] for i in chance.integers(0, len(letters), n))
