"""The input of the codec: token ids and their vocabulary."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from towerd.tokens import Ids

IDS_MAX = 1 << 24
"""Maximum number of token ids in one blob; no chat is longer."""


class TokenVocabulary(Protocol):
    """A model's tokenizer, as far as the codec needs it."""

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes that each id stands for in text; b"" for control tokens."""
        ...

    @property
    def names(self) -> Sequence[bytes]:
        """How each control token is written in the model's template; b"" for all other ids."""
        ...

    def tokenize(self, text: bytes) -> Sequence[int] | Ids:
        """Ids of valid UTF-8 text; nothing is added and control tokens are not parsed."""
        ...


def as_ids(ids: Sequence[int] | Ids) -> Ids:
    """`ids` as int32[n]; those of media (`media.py`) are negative. ValueError for other values."""
    wide = np.asarray(ids, dtype=np.int64).reshape(-1)
    if len(wide) and (int(wide.min()) < -(1 << 31) or int(wide.max()) >= 1 << 31 or -1 in wide):
        raise ValueError("Ids are integers from 0 to 2^31 - 1, or negative and not -1 for media.")
    return wide.astype(np.int32)


def ids_hash(ids: Ids) -> bytes:
    """16 bytes of BLAKE2b over the ids as little-endian int32."""
    return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16).digest()


def vocabulary_hash(vocabulary: TokenVocabulary) -> bytes:
    """8 bytes that name a vocabulary: its pieces and control tokens, in order of their ids."""
    digest = hashlib.blake2b(digest_size=8)
    for table in (vocabulary.pieces, vocabulary.names):
        digest.update(np.array([len(piece) for piece in table], "<u4").tobytes())
        digest.update(b"".join(table))
    return digest.digest()
