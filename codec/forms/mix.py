"""The form `mix`: text in the tokens of the mini model, coded with context mixing.

It is portable: the table is in the package and all arithmetic is on integers. The mixer reads the
base without coding it, so that names and phrases of a shared prompt cost next to nothing in the
session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from towerd.codec.base import TokenVocabulary, vocabulary_hash
from towerd.codec.container import CodedChunk
from towerd.codec.errors import Damaged
from towerd.codec.forms.form import Coded, TextCoder
from towerd.codec.prior.file import Prior
from towerd.codec.text import MARK_FIRST, Text, as_context, from_ids, parse, split
from towerd.codec.vocabulary import probe
from towerd.kernels._native import Mixer, RangeDecoder, RangeEncoder
from towerd.tokens import Ids

BASE_IDS_MAX = 16384
"""Only the last ids of a longer base are read."""
KINDS = (1, 2, 3, 0, 4, 5, 6, 7)
"""The control token of the mini vocabulary for each kind of mark. Its chat form has the tokens
begin (of the text), start (of a message), end, and thirteen without a meaning."""
WRITTEN = {"4650871a062739be": "3d185f6db51e9e2b0225d768e71be48a"}
"""What `probe` gives for the mini vocabulary whose hash this is, when blobs are written."""
MIXERS_KEPT_MAX = 20
"""Mixers that a pool keeps. Each takes about a megabyte, and up to ten after a long session."""
_SLOTS_PER_SYMBOL = 40
Symbols = npt.NDArray[np.int32]


class MiniText:
    """Text with marks, as symbols: ranks of the mini vocabulary."""

    def __init__(self, prior: Prior) -> None:
        self.prior = prior
        self.controls = [prior.controls[i] for i in KINDS]
        bytes_of = list(prior.pieces)
        single = {piece: token for token, piece in enumerate(bytes_of) if len(piece) == 1}
        self.spelled = {
            token: [single[bytes((byte,))] for byte in prior.vocabulary.pieces[token]]
            for token in prior.controls
            if prior.vocabulary.pieces[token]
        }
        for kind, token in enumerate(self.controls):
            bytes_of[token] = bytes((MARK_FIRST + kind,))
        self.bytes_by_rank = [bytes_of[token] for token in prior.ids]

    def symbols(self, text: bytes) -> Symbols:
        """int32[n] ranks of UTF-8 with marks."""
        ids: list[int] = []
        for part in split(text):
            if len(part) == 1 and part[0] >= MARK_FIRST:
                ids.append(self.controls[part[0] - MARK_FIRST])
            elif part:
                ids += self._tokenize(part)
        return self.prior.ranks[np.array(ids, np.int64)]

    def _tokenize(self, run: bytes) -> list[int]:
        """llama.cpp takes some names of control tokens in a text for the token: spell them out."""
        ids = [int(i) for i in self.prior.vocabulary.tokenize(run)]
        if self.spelled.keys().isdisjoint(ids):
            return ids
        return [byte for token in ids for byte in self.spelled.get(token, (token,))]

    def cuts_as_written(self) -> bool:
        """Whether a base is known to be cut into the symbols that blobs were written after."""
        return self.written() == self.probe()

    def written(self) -> str | None:
        """What `probe` gave when the first blobs were written; None if that is not known."""
        return WRITTEN.get(self.hash())

    def probe(self) -> str:
        """See `codec.probe`, for this vocabulary."""
        return probe(self.prior.vocabulary.tokenize)

    def hash(self) -> str:
        """The hash of the vocabulary, 16 hex digits."""
        return vocabulary_hash(self.prior.vocabulary).hex()

    def text(self, ranks: list[int]) -> bytes:
        """The text again."""
        return b"".join([self.bytes_by_rank[rank] for rank in ranks])


class MixerPool:
    """Mixers of one table and state. A new mixer checks its tables and builds its tree in some 20 ms,
    longer than it takes to code a short session. Thread-safe."""

    def __init__(self, make: Callable[[], Mixer]) -> None:
        self._make = make
        self._free: list[Mixer] = []

    @contextmanager
    def borrow(self, n_symbols: int, context: Symbols, lanes: int = 1) -> Iterator[Mixer]:
        """A mixer that has only read `context`, with room for `n_symbols` in `lanes` texts."""
        try:
            mixer = self._free.pop()
        except IndexError:
            mixer = self._make()
        try:
            mixer.reset(lanes, table_bits(n_symbols + len(context)))
            mixer.learn(0, context)
            yield mixer
        finally:
            if len(self._free) < MIXERS_KEPT_MAX:
                self._free.append(mixer)


def table_bits(n_symbols: int) -> int:
    """Size of the mixer's hash table: a slot for each context of each decision."""
    return min(22, max(12, (n_symbols * _SLOTS_PER_SYMBOL).bit_length()))


class MiniCoder(TextCoder):
    """A form whose text is coded in the symbols of a mini vocabulary, after the base's."""

    uses_base = True

    def __init__(self, vocabulary: TokenVocabulary, prior: Prior) -> None:
        super().__init__(vocabulary)
        self.prior, self.mini = prior, MiniText(prior)

    def _context(self, base: Ids, kinds: tuple[int, ...]) -> Symbols:
        return self.mini.symbols(as_context(base[-BASE_IDS_MAX:], kinds, self.vocabulary))


class Mix(MiniCoder):
    """The `FormCoder` of `mix`."""

    name = "mix"

    def __init__(self, vocabulary: TokenVocabulary, prior: Prior) -> None:
        super().__init__(vocabulary, prior)
        self.model = prior.name
        self.mixers = MixerPool(prior.mixer)

    def encode(self, ids: Ids, base: Ids) -> Coded:
        """One chunk."""
        text = from_ids(ids, self.vocabulary)
        symbols = self.mini.symbols(text.text)
        encoder = RangeEncoder()
        with self.mixers.borrow(len(symbols), self._context(base, text.kinds)) as mixer:
            encoder.put(*mixer.encode(0, symbols))
        return Coded(text.side(), (CodedChunk(len(symbols), encoder.finish()),))

    def text(self, coded: Coded, n_ids: int, base: Ids) -> Text:
        """See `TextCoder.text`."""
        bits = coded.only_chunk()
        n_symbols = coded.chunks[0].n_symbols
        kinds = parse(b"", coded.side).kinds
        with self.mixers.borrow(n_symbols, self._context(base, kinds)) as mixer:
            try:
                ranks = mixer.decode(0, RangeDecoder(bits), n_symbols).tolist()
            except ValueError as error:
                raise Damaged(f"The blob is damaged: {error}.") from error
        return parse(self.mini.text(ranks), coded.side)
