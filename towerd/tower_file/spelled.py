"""Ids that could not be made when the file was written, as their text and what corrects it.

varint: ids | hash of the ids 16 | side information (`codec/text.py`) and media (`codec/media.py`),
each after its length | compressed: the text
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from towerd.codec import varint
from towerd.codec.base import IDS_MAX
from towerd.codec.text import parse
from towerd.codec.varint import VarintReader
from towerd.tower_file.fields import put_bytes, put_compressed, read_bytes, read_compressed

if TYPE_CHECKING:
    from towerd.codec.codec import WrittenText

_HASH_BYTES = 16


def put_spelled(written: WrittenText) -> bytes:
    """The bytes of a written text."""
    head = varint.put(written.n_ids) + written.hash
    side = put_bytes(written.text.side()) + put_bytes(written.media)
    return head + side + put_compressed(written.text.text)


def read_spelled(reader: VarintReader) -> WrittenText:
    """The inverse of `put_spelled`."""
    from towerd.codec.codec import WrittenText

    n_ids, hash = reader.number(IDS_MAX + 1), reader.take(_HASH_BYTES)
    side, media = read_bytes(reader), read_bytes(reader)
    return WrittenText(parse(read_compressed(reader), side), n_ids, hash, media)
