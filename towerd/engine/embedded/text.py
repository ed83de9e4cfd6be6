"""Bytes of token pieces in, certain UTF-8 text out."""

from __future__ import annotations

import codecs


class TextStream:
    """An incremental UTF-8 decoder that never emits half a character.

    Bytes that can no longer become a character are U+FFFD, as Unicode recommends (one for each
    maximal subpart); the concatenated output equals decoding all bytes at once."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_pending(self) -> bool:
        """Whether the last bytes are the beginning of a character."""
        return bool(self._decoder.getstate()[0])

    def push(self, data: bytes) -> str:
        """The text that became certain with these bytes."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end: an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", True)
