"""How a conversation becomes token ids.

A form knows one vocabulary. The mini model's is

    <|begin|> (<|im_start|> role LF content <|im_end|>)*

where only the words in brackets are control symbols. This is what remains of a chat template such
as ChatML when its special tokens become symbols and the rest stays text. Every second conversation
has a line feed after <|im_end|>, as many templates do, and a document (role "document") is plain
text, as in a completion without a template.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lab.texts.chat_records import ChatRecord
from lab.train.data.bpe import BEGIN, END, START, Bpe

Ids = npt.NDArray[np.uint32]
Marks = npt.NDArray[np.uint8]

ROLES = ("user", "assistant", "document", "other")
"""The roles that the evaluation distinguishes; the mark of a token is an index into it."""
DOCUMENT = "document"


def mark_of(role: str) -> int:
    """The mark of all tokens of a message of `role`."""
    return ROLES.index(role) if role in ROLES else ROLES.index("other")


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """Token ids [n] of one conversation, and the mark of each [n]."""

    ids: Ids
    marks: Marks


class TextForm(Protocol):
    """A vocabulary and a way to write conversations in it."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Changes whenever `encode` would give other ids."""
        ...

    def encode(self, records: Sequence[ChatRecord]) -> list[EncodedRecord]:
        """The ids of each record."""
        ...


class MiniForm:
    """The form of the mini model, see above."""

    def __init__(self, bpe: Bpe) -> None:
        self._bpe = bpe
        (self._line_feed,) = bpe.encode(["\n"])

    @property
    def n_vocab(self) -> int:
        return len(self._bpe)

    @property
    def fingerprint(self) -> str:
        return f"mini-1-{self._bpe.fingerprint}"

    def encode(self, records: Sequence[ChatRecord]) -> list[EncodedRecord]:
        texts = [text for record in records for text in _texts(record)]
        tokens = iter(self._bpe.encode(texts))
        return [self._assemble(record, tokens) for record in records]

    def _assemble(self, record: ChatRecord, tokens: Iterator[list[int]]) -> EncodedRecord:
        feed = self._line_feed if _has_line_feed(record) else []
        ids, marks = [BEGIN], [mark_of(record.messages[0].role)]
        for message in record.messages:
            body = next(tokens)
            said = body if message.role == DOCUMENT else [START, *body, END, *feed]
            ids += said
            marks += [mark_of(message.role)] * len(said)
        return EncodedRecord(np.array(ids, dtype=np.uint32), np.array(marks, dtype=np.uint8))


def _texts(record: ChatRecord) -> list[str]:
    return [
        message.content if message.role == DOCUMENT else f"{message.role}\n{message.content}"
        for message in record.messages
    ]


def _has_line_feed(record: ChatRecord) -> bool:
    return hashlib.blake2b(record.src.encode(), digest_size=1).digest()[0] % 2 == 1
