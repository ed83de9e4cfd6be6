"""Tokenizes a prompt that continues an earlier one: only what is new.

A client sends its whole chat every turn, and tokenizing it takes longer every turn. llama.cpp cuts
a text at its special tokens first and tokenizes what is between them piece by piece, so the ids of
two texts that begin alike are the same up to the last special token that both have there:

    before   <s> Tim had a ball. <e> He was glad. <e> Why?
    now      <s> Tim had a ball. <e> He was glad. <e> Where is it? <e> There.
             [ ids that are known               ) [ text to be tokenized     )

The texts themselves are compared, byte by byte. Where it is not certain that llama.cpp cuts at that
place (special tokens that overlap, or that their neighbours would swallow) all is tokenized.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from towerd.llama_library import lib
from towerd.model.vocab import Vocab
from towerd.tokens import Ids, common_prefix

TEXT_BYTES_MIN = 4096
"""Shorter texts are tokenized at once, in less than a millisecond."""
TEXTS_MAX = 64
BYTES_MAX = 32 << 20
_NO_IDS: Ids = np.zeros(0, np.int32)
PART_BYTES = 4 * 1024
_SPECIAL = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_USER_DEFINED
_SPECIAL |= lib.LLAMA_TOKEN_ATTR_UNKNOWN
_CUT_BYTES_MIN = 3
"""Shorter special tokens are not cut at: text may be full of them."""


class SpecialTokens:
    """The special tokens of one vocabulary, and where a text may be cut at them. Thread-safe.

    Parts of a text that begin with one may be tokenized by themselves. This is necessary: llama.cpp
    walks a list of all parts so far for every special token that it meets, which takes 8 s for a chat
    of 50,000 messages."""

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


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A text that was tokenized. `cuts`: of each special token in it, its text and where among the
    ids it stands, one for each time that it stands in the text."""

    text: bytes
    ids: Ids
    cuts: tuple[tuple[bytes, npt.NDArray[np.int64]], ...]

    @property
    def nbytes(self) -> int:
        return len(self.text) + self.ids.nbytes


class Retokenizer:
    """A vocabulary's tokenizer that remembers the last texts. Thread-safe."""

    def __init__(self, vocab: Vocab, text_bytes_min: int = TEXT_BYTES_MIN) -> None:
        self.n_bytes_tokenized = 0
        self.specials = SpecialTokens(vocab)
        self._vocab = vocab
        self._text_bytes_min = text_bytes_min
        self._known: OrderedDict[int, _Known] = OrderedDict()
        """By number, the last used last."""
        self._n_known = 0
        self._nbytes = 0
        self._lock = threading.Lock()

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> Ids:
        """As `Vocab.tokenize`, whose errors it raises."""
        vocab = self._vocab
        try:
            data = text.encode()
        except UnicodeEncodeError:  # which it says better
            return vocab.tokenize(text, add_special, parse_special)
        is_ended = add_special and self.specials.are_at_the_end  # what is known has an end, too
        if len(data) < self._text_bytes_min or not (add_special and parse_special) or is_ended:
            self.n_bytes_tokenized += len(data)
            return self.specials.tokenize(data, add_special, parse_special)
        number, start, ids = self._known_part(data)
        self.n_bytes_tokenized += len(data) - start
        if start:
            ids = np.concatenate([ids, self.specials.tokenize(data[start:], False, True)])
        else:
            ids = self.specials.tokenize(data, True, True)
        self._remember(_Known(data, ids, self._cuts(data, ids)), number)
        return ids.copy()

    def _known_part(self, data: bytes) -> tuple[int | None, int, Ids]:
        """The number of the known text that `data` begins with, if it does; from where on `data` is
        to be tokenized, and the ids of what is before that."""
        with self._lock:
            candidates = list(self._known.items())
        begun: int | None = None
        start, ids, wanted = 0, _NO_IDS, np.frombuffer(data, np.uint8)
        for number, known in candidates:
            n = common_prefix(np.frombuffer(known.text, np.uint8), wanted)
            if n == len(known.text):
                begun = number
            at, i = _last_cut(known, n) if n > start else (0, 0)
            is_cut = self.specials.is_cut
            if at > start and is_cut(known.text, at) and is_cut(data, at):
                start, ids = at, known.ids[:i]
        return begun, start, ids

    def _remember(self, known: _Known, begun: int | None) -> None:
        """Keep it, instead of the one that it continues."""
        with self._lock:
            before = self._known.pop(begun, None) if begun is not None else None
            self._nbytes += known.nbytes - (0 if before is None else before.nbytes)
            self._n_known += 1
            self._known[self._n_known] = known
            while len(self._known) > TEXTS_MAX or self._nbytes > BYTES_MAX:
                self._nbytes -= self._known.popitem(last=False)[1].nbytes

    def _cuts(self, data: bytes, ids: Ids) -> tuple[tuple[bytes, npt.NDArray[np.int64]], ...]:
        found = []
        vocab = self._vocab
        for token in np.unique(ids[self.specials.is_control[ids]]).tolist():
            word = self.specials.texts[token]
            places = np.flatnonzero(ids == token)
            if vocab.add_bos and token == vocab.bos_id:
                places = places[1:]  # the first is not in the text
            if len(places) == data.count(word):  # else some of them are something else
                found.append((word, places))
        return tuple(found)


def _last_cut(known: _Known, n: int) -> tuple[int, int]:
    """Where the last special token that ends within the first `n` bytes begins, in the text and
    among the ids; 0 if there is none."""
    at, word, places = max(
        ((known.text.rfind(word, 0, n), word, places) for word, places in known.cuts),
        key=lambda cut: cut[0],
        default=(-1, b"", np.zeros(0, np.int64)),
    )
    return (at, int(places[known.text.count(word, 0, at)])) if at > 0 else (0, 0)
