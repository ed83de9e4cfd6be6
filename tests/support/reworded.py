"""A tokenizer that changed: the same tokens, other ids for the same text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from towerd.codec.base import TokenVocabulary
from towerd.tokens import Ids


class Reworded:
    """The `TokenVocabulary` of another one that writes every second letter by itself."""

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self._vocabulary = vocabulary
        self.pieces: Sequence[bytes] = vocabulary.pieces
        self.names: Sequence[bytes] = vocabulary.names
        self._letters: dict[bytes, int] = {
            piece: i for i, piece in enumerate(self.pieces) if len(piece) == 1
        }

    def tokenize(self, text: bytes) -> Ids:
        """int32[n] ids."""
        ids = np.asarray(self._vocabulary.tokenize(text), np.int32).tolist()
        out: list[int] = []
        for place, token in enumerate(ids):
            letters = [self._letters.get(bytes((byte,)), -1) for byte in self.pieces[token]]
            out += [token] if place % 2 or -1 in letters else letters
        return np.array(out, np.int32)
