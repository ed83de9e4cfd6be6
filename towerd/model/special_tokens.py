"""The special tokens of a vocabulary, and where a text may be cut at them.

llama.cpp cuts a text at its special tokens before it tokenizes what is between them, so a text may
be tokenized in parts that begin with one. This is necessary: llama.cpp walks a list of all parts so
far for every special token that it meets, which takes 8 s for a chat of 50,000 messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from towerd.llama_library import lib
from towerd.model.vocab import Vocab
from towerd.tokens import Ids

PART_BYTES = 4 * 1024
_SPECIAL = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_USER_DEFINED
_SPECIAL |= lib.LLAMA_TOKEN_ATTR_UNKNOWN
_CUT_BYTES_MIN = 3
"""Shorter special tokens are not cut at: text may be full of them."""


class SpecialTokens:
    """The special tokens of one vocabulary. Thread-safe."""

    def __init__(self, vocab: Vocab, part_bytes: int = PART_BYTES) -> None:
        self._vocab = vocab
        self._part_bytes = part_bytes

    def tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> Ids:
        """As `Vocab.tokenize`, in time linear in the length of the text."""
        vocab, is_ended = self._vocab, add_special and self.are_at_the_end
        if len(data) <= self._part_bytes or not parse_special or is_ended:
            return vocab.tokenize(data, add_special, parse_special)
        parts = self._parts(data)
        found = [vocab.tokenize(next(parts), add_special, True)]
        found += [vocab.tokenize(part, False, True) for part in parts]
        return np.concatenate(found)

    def is_cut(self, data: bytes, at: int) -> bool:
        """Whether a special token begins at `at` that is recognised in any surroundings, because no
        other one overlaps it."""
        return bool(self._cut_at(data, at))

    @property
    def are_at_the_end(self) -> bool:
        """Whether a whole text ends with a token that its parts do not have."""
        vocab = self._vocab
        return vocab.add_eos or vocab.vocab_type == lib.LLAMA_VOCAB_TYPE_WPM

    @cached_property
    def texts(self) -> dict[int, bytes]:
        """The text of every token that llama.cpp looks for before it tokenizes."""
        vocab, attr = self._vocab, lib.llama_vocab_get_attr
        each = (i for i in range(vocab.n_vocab) if attr(vocab.ptr, i) & _SPECIAL)
        return {i: word for i in each if (word := lib.llama_vocab_get_text(vocab.ptr, i))}

    @cached_property
    def is_control(self) -> npt.NDArray[np.bool_]:
        """bool[n_vocab]: the tokens that a text can be cut at. Tokens with space at their ends are
        excluded: neighbours may strip it."""
        vocab, attr = self._vocab, lib.llama_vocab_get_attr
        found = np.zeros(vocab.n_vocab, np.bool_)
        for i, word in self.texts.items():
            is_control = attr(vocab.ptr, i) & lib.LLAMA_TOKEN_ATTR_CONTROL
            found[i] = is_control and len(word) >= _CUT_BYTES_MIN and word == word.strip()
        return found

    def _parts(self, data: bytes) -> Iterator[bytes]:
        """`data` in parts of about `part_bytes`; all but the first begin with special tokens."""
        words = [self.texts[i] for i in np.flatnonzero(self.is_control).tolist()]
        start = seen = 0
        while len(data) - start > self._part_bytes:
            stop = max(start, seen) + self._part_bytes
            at = self._last_cut(data, max(start + 1, seen), stop, words)
            seen = stop
            if at:
                yield data[start:at]
                start = at
            elif stop >= len(data):
                break
        yield data[start:]

    def _last_cut(self, data: bytes, low: int, high: int, words: list[bytes]) -> int:
        """A place in [low, high) to cut at; 0 if there is none. The word that it was found with
        moves to the front of `words`: it is likely that of the next part."""
        for i, word in enumerate(words):
            at = data.rfind(word, low, high + len(word) - 1)
            if at > 0 and (own := self._cut_at(data, at)) and own not in self._stripping:
                words.insert(0, words.pop(i))
                return at
        return 0

    def _cut_at(self, data: bytes, at: int) -> bytes:
        """The special token that begins at `at` if no other one overlaps it, else nothing."""
        first = max(0, at - self._bytes_max)
        around = data[first : at + 2 * self._bytes_max]
        at -= first
        own = max((w for w in self.words if around.startswith(w, at)), key=len, default=b"")
        end = at + len(own)
        for word in self.words:
            place = around.find(word)
            while 0 <= place < end:
                if place + len(word) > at and (place != at or word != own):
                    return b""
                place = around.find(word, place + 1)
        return own

    @cached_property
    def words(self) -> tuple[bytes, ...]:
        """The texts of the special tokens, without duplicates."""
        return tuple(set(self.texts.values()))

    @cached_property
    def _stripping(self) -> frozenset[bytes]:
        """Special tokens that strip the space before them, which they cannot do at the start of a
        part."""
        attr = lib.llama_vocab_get_attr
        ids = (i for i in self.texts if attr(self._vocab.ptr, i) & lib.LLAMA_TOKEN_ATTR_LSTRIP)
        return frozenset(self.texts[i] for i in ids)

    @cached_property
    def _bytes_max(self) -> int:
        return max(map(len, self.words), default=0)
