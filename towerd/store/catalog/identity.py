"""Identities: what makes token ids mean the same, and what makes rows usable."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from towerd.slots.row_identity import REPORTED_HASH_PREFIX, RowIdentity


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """What conversations hang on: token ids mean the same text and come about in the same way."""

    pieces: str
    """The row identity's `tokenizer`: a hash of every token's bytes."""
    rules: str | None = None
    """A hash of how text is cut into tokens (merges, scores, token types, pre-tokenizer); None if
    it is not known, as for a llama-server elsewhere."""

    def digest(self) -> bytes:
        """32 bytes, under which a store enters it."""
        h = hashlib.blake2b(self.pieces.encode(), digest_size=32)
        h.update(b"\0" + (self.rules or "").encode())
        return h.digest()


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What a store is opened for: the row identity, and how the model's tokenizer cuts text."""

    row_identity: RowIdentity
    rules: str | None = None

    @property
    def tokenizer(self) -> TokenizerIdentity:
        """The tokenizer identity of the model."""
        known = self.row_identity
        return TokenizerIdentity(pieces_of(known.tokenizer, known.model_hash), self.rules)


def pieces_of(tokenizer: str, model_hash: str) -> str:
    """A row identity's `tokenizer`; with its model's hash if a server only reported it, because its
    tokens were then not seen."""
    is_reported = model_hash.startswith(REPORTED_HASH_PREFIX)
    return f"{tokenizer} {model_hash}" if is_reported else tokenizer
