"""A model's own tokenizer as a codec needs it: any text is spelled exactly, and there is a token
for every mark of a text (`codec/text.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from towerd.codec.text import KIND_NAMES, KINDS_MAX
from towerd.codec.vocabulary import GgufVocabulary, longest_matches
from towerd.tokens import Ids

N_MARKS = KINDS_MAX + 1
BEGIN = 3
"""The kind of mark that starts a text."""
NEVER_IN_TEXT = (0xC0, 0xC1, *range(0xF5, 0x100))
"""Bytes that valid UTF-8 does not have."""


class MarkedVocabulary:
    """The `TokenVocabulary` of a GGUF, with more tokens behind its own: the marks that none of its
    control tokens stands for, and the bytes that it has no token for (some lack a few)."""

    def __init__(self, path: Path) -> None:
        """UnknownModel if the file has no tokenizer."""
        self._own = GgufVocabulary(path)
        self.n_own = self._own.n_tokens
        names, known = self._own.names, set(self._own.pieces)
        found = [next((i for i, name in enumerate(names) if name in of), -1) for of in KIND_NAMES]
        found += [-1] * (N_MARKS - len(found))
        new = iter(range(self.n_own, self.n_own + N_MARKS))
        self.marks = tuple(next(new) if token < 0 else token for token in found)
        """The token of each kind of mark."""
        bytes_of = [bytes((byte,)) for byte in range(256) if byte not in NEVER_IN_TEXT]
        more = [b""] * found.count(-1) + [byte for byte in bytes_of if byte not in known]
        self.pieces: Sequence[bytes] = [*self._own.pieces, *more]
        self.names: Sequence[bytes] = [*names, *[b""] * len(more)]
        self._token_of = {piece: i for i, piece in enumerate(self.pieces)}

    def tokenize(self, text: bytes) -> Ids:
        """int32[n] ids whose pieces are `text`, valid UTF-8: the tokenizer's own where they are.

        Some tokenizers put a space in front of a text, and some change it."""
        ids = self._own.tokenize(text)
        spelled = b"".join([self.pieces[i] for i in ids.tolist()])
        if spelled == text:
            return ids
        if spelled == b" " + text and (first := self.pieces[ids[0]]).startswith(b" "):
            return np.append(self._spell(first[1:]), ids[1:]).astype(np.int32)
        return longest_matches(text, self.pieces).astype(np.int32)

    def close(self) -> None:
        """Free the tokenizer."""
        self._own.close()

    def _spell(self, piece: bytes) -> list[int]:
        if not piece or piece in self._token_of:
            return [self._token_of[piece]] if piece else []
        return [self._token_of[bytes((byte,))] for byte in piece]
