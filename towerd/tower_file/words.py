"""The words of a `.tower` file: what the token ids in it stand for, so that it can be read as text
without their vocabulary.

    compressed: varint: ids | per id a varint, its difference to the one before
                per id a varint, twice the bytes of its piece or name, plus 1 for a control token
                the pieces and names
"""

from __future__ import annotations

from collections.abc import Iterable

from towerd.codec import varint
from towerd.codec.varint import VarintReader
from towerd.store.catalog.vocabularies import KeptVocabulary, some_words
from towerd.tower_file.fields import (
    TowerFileError,
    contradiction,
    put_compressed,
    read_compressed,
)

WORD_BYTES_MAX = 1024
"""Maximum of a piece's or name's bytes; known vocabularies have up to some hundred."""


def put_words(ids: Iterable[int], vocabulary: KeptVocabulary) -> bytes:
    """What each of `ids`, ascending and all in the vocabulary, stands for."""
    steps, sizes, pieces, before = [], [], [], 0
    for id in ids:
        name = vocabulary.names[id]
        piece = name or vocabulary.pieces[id]
        if len(piece) > WORD_BYTES_MAX:
            raise TowerFileError(
                f"The session has a token of {len(piece)} bytes, and a .tower file holds up to "
                f"{WORD_BYTES_MAX} of each."
            )
        steps.append(id - before)
        sizes.append(2 * len(piece) + bool(name))
        pieces.append(piece)
        before = id
    head = varint.put(len(steps)) + varint.put_all(steps) + varint.put_all(sizes)
    return put_compressed(head + b"".join(pieces))


def read_words(reader: VarintReader, n_tokens: int) -> tuple[set[int], KeptVocabulary]:
    """The ids that have words, and the words, of a vocabulary of so many tokens."""
    inner = VarintReader(read_compressed(reader))
    n = inner.number()
    steps, sizes = inner.numbers(n), inner.numbers(n)
    found: dict[int, tuple[bytes, bytes]] = {}
    id = 0
    for place, (step, size) in enumerate(zip(steps, sizes, strict=True)):
        id += step
        if id >= n_tokens or (place and not step) or size >> 1 > WORD_BYTES_MAX:
            raise contradiction()
        word = inner.take(size >> 1)
        found[id] = (b"", word) if size & 1 else (word, b"")
    inner.end()
    return set(found), some_words(n_tokens, found)
