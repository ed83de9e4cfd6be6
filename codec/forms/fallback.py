"""Forms that need no model: every machine with the same vocabulary can read them.

`packed` needs nothing but the ids. `ranked` replaces each id by its rank in the bundled sample, so
that most take one byte, and compresses the result with zstd and the sample as its dictionary;
`text` does the same with the text. Ranks follow from the pieces alone (longest match, not the
tokenizer), so they stay the same if a tokenizer changes its merges.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter

import numpy as np
import numpy.typing as npt
import zstandard

from towerd.codec import varint
from towerd.codec.base import TokenVocabulary
from towerd.codec.container import CodedChunk
from towerd.codec.errors import Damaged
from towerd.codec.forms.form import Coded, TextCoder
from towerd.codec.prior import sample
from towerd.codec.text import Text, from_ids, parse
from towerd.codec.vocabulary import longest_matches
from towerd.tokens import Ids

LEVEL = 19
_WINDOW_BYTES_MAX = 1 << 26
_RANK_BYTES_MAX = 5
Ranks = npt.NDArray[np.uint32]


class Packed:
    """Ids, each in as many bits as the vocabulary needs."""

    name, model, uses_base = "packed", b"", False

    def __init__(self, n_tokens: int) -> None:
        """`n_tokens`: of the vocabulary."""
        self.width = max(1, (n_tokens - 1).bit_length())

    def encode(self, ids: Ids, base: Ids) -> Coded:
        """The bits, most significant first."""
        shifts = np.arange(self.width - 1, -1, -1)
        return Coded(
            b"", (CodedChunk(len(ids), np.packbits(ids[:, None] >> shifts & 1).tobytes()),)
        )

    def decode(self, coded: Coded, n_ids: int, base: Ids) -> Ids:
        """The ids again."""
        bits = coded.only_chunk()
        if coded.side or len(bits) != -(-n_ids * self.width // 8):
            raise Damaged("The blob is damaged: its packed ids have another length.")
        flat = np.unpackbits(np.frombuffer(bits, np.uint8), count=n_ids * self.width)
        weights = 1 << np.arange(self.width - 1, -1, -1, dtype=np.int32)
        return (flat.reshape(n_ids, self.width) @ weights).astype(np.int32)


class Ranked:
    """Ranks as varints, with zstd."""

    name, uses_base = "ranked", False

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        """Count the ranks, once per vocabulary; it takes about a second."""
        segments = longest_matches(sample.load(), vocabulary.pieces)
        self.order = _by_count(segments, len(vocabulary.pieces))
        self.ranks = np.empty(len(self.order), np.uint32)
        self.ranks[self.order] = np.arange(len(self.order), dtype=np.uint32)
        dictionary = varint.pack(self.ranks[segments])
        self.zstd = _Zstd(dictionary)
        packed = varint.pack(self.order.astype(np.uint32))
        self.model = hashlib.blake2b(packed + dictionary, digest_size=8).digest()

    def encode(self, ids: Ids, base: Ids) -> Coded:
        """The compressed varints."""
        return Coded(b"", (CodedChunk(len(ids), self.zstd.compress(varint.pack(self.ranks[ids]))),))

    def decode(self, coded: Coded, n_ids: int, base: Ids) -> Ids:
        """The ids again."""
        bits = coded.only_chunk()
        if coded.side:
            raise Damaged("The blob is damaged: ranked ids have no side information.")
        ranks = varint.unpack(self.zstd.decompress(bits, n_ids * _RANK_BYTES_MAX), n_ids)
        if n_ids and int(ranks.max()) >= len(self.order):
            raise Damaged("The blob is damaged: it holds a rank that the vocabulary lacks.")
        return self.order[ranks.astype(np.int64)]


class ZstdText(TextCoder):
    """Text and its exceptions, with zstd."""

    name, uses_base = "text", False

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        super().__init__(vocabulary)
        self.zstd, self.model = _Zstd(sample.load()), sample.name()
        self.piece_bytes_max = max(map(len, vocabulary.pieces), default=1) + 1

    def encode(self, ids: Ids, base: Ids) -> Coded:
        """Exceptions, and the compressed text."""
        text = from_ids(ids, self.vocabulary)
        return Coded(text.side(), (CodedChunk(len(ids), self.zstd.compress(text.text)),))

    def text(self, coded: Coded, n_ids: int, base: Ids) -> Text:
        """See `TextCoder.text`."""
        text = self.zstd.decompress(coded.only_chunk(), n_ids * self.piece_bytes_max)
        return parse(text, coded.side)


class _Zstd:
    """zstd with a dictionary; the container has the magic number, checksum and size."""

    def __init__(self, dictionary: bytes) -> None:
        self.dictionary = zstandard.ZstdCompressionDict(
            dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT
        )

    @functools.cached_property
    def _compressor(self) -> zstandard.ZstdCompressor:
        params = zstandard.ZstdCompressionParameters.from_level(
            LEVEL,
            dict_size=len(self.dictionary.as_bytes()),
            format=zstandard.FORMAT_ZSTD1_MAGICLESS,
            write_content_size=False,
            write_checksum=False,
            write_dict_id=False,
        )
        self.dictionary.precompute_compress(compression_params=params)
        return zstandard.ZstdCompressor(dict_data=self.dictionary, compression_params=params)

    def compress(self, data: bytes) -> bytes:
        """One frame."""
        return self._compressor.compress(data)

    def decompress(self, frame: bytes, bytes_max: int) -> bytes:
        """The data of a frame, at most `bytes_max` bytes; Damaged for anything else."""
        decompressor = zstandard.ZstdDecompressor(
            dict_data=self.dictionary,
            max_window_size=_WINDOW_BYTES_MAX,
            format=zstandard.FORMAT_ZSTD1_MAGICLESS,
        )
        try:
            with decompressor.stream_reader(frame) as stream:
                data = stream.read(bytes_max + 1)
        except zstandard.ZstdError as error:
            raise Damaged(f"The blob is damaged: zstd says {error}.") from error
        if len(data) > bytes_max:
            raise Damaged("The blob is damaged: it decompresses to more than its ids.")
        return data


def _by_count(segments: npt.NDArray[np.int64], n_tokens: int) -> Ids:
    """All ids, the most frequent first; ids that occur equally often are in order."""
    counts = Counter(segments.tolist())
    return np.array(sorted(range(n_tokens), key=lambda i: (-counts[i], i)), np.int32)
