"""The interface between the codec and the forms of a blob; what all forms that write text share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from towerd.codec.base import TokenVocabulary
from towerd.codec.container import CodedChunk
from towerd.codec.errors import Damaged
from towerd.codec.text import Text, to_ids
from towerd.tokens import Ids


@dataclass(frozen=True)
class Coded:
    """The encoded ids: side information, and the coder's output by chunk."""

    side: bytes
    chunks: tuple[CodedChunk, ...]
    n_ctx: int = 0
    """See `Form.n_ctx`."""

    def only_chunk(self) -> bytes:
        """The bits of a form that has one chunk; Damaged if there are more or none."""
        if len(self.chunks) != 1:
            raise Damaged("The blob is damaged: it should have one chunk.")
        return self.chunks[0].bits


class FormCoder(Protocol):
    """One way to write the ids of a vocabulary; thread-safe."""

    @property
    def name(self) -> str:
        """A name in `container.FORMS`."""
        ...

    @property
    def model(self) -> bytes:
        """8 bytes that name the model or table it needs; b"" if it needs none."""
        ...

    @property
    def uses_base(self) -> bool:
        """Whether the bits depend on the base."""
        ...

    def encode(self, ids: Ids, base: Ids) -> Coded:
        """Encode at least one id, all of them in the vocabulary, that follow `base`."""
        ...

    def decode(self, coded: Coded, n_ids: int, base: Ids) -> Ids:
        """The ids again; Damaged if `encode` cannot have written this."""
        ...


class TextCoder(ABC):
    """A form that writes the text of the ids, which `decode` tokenizes again."""

    name: str
    model: bytes

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self.vocabulary = vocabulary

    def decode(self, coded: Coded, n_ids: int, base: Ids) -> Ids:
        """See `FormCoder.decode`."""
        return np.array(to_ids(self.text(coded, n_ids, base), self.vocabulary), np.int32)

    @abstractmethod
    def text(self, coded: Coded, n_ids: int, base: Ids) -> Text:
        """The text and what corrects its ids; Damaged if `encode` cannot have written this."""
