"""Reading and writing a `.tower` file; the layout is in the package's docstring."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from towerd.codec import varint
from towerd.codec.base import TokenVocabulary
from towerd.codec.codec import WrittenText, pack_ids, packed_ids
from towerd.codec.errors import CodecError
from towerd.codec.text import MARK_FIRST
from towerd.codec.varint import VarintReader
from towerd.store.catalog.identity import TokenizerIdentity
from towerd.store.catalog.vocabularies import MEDIUM, TEXT_BYTES_MAX, KeptVocabulary
from towerd.store.sessions.history import History
from towerd.store.sessions.sessions import NAME_CHARS_MAX, TITLE_CHARS_MAX
from towerd.tower_file.fields import (
    TowerFileError,
    contradiction,
    put_bytes,
    put_text,
    put_time,
    read_bytes,
    read_flag,
    read_text,
    read_time,
)
from towerd.tower_file.spelled import put_spelled, read_spelled
from towerd.tower_file.turns import check_size, put_bases, put_turns, read_bases, read_turns
from towerd.tower_file.words import put_words, read_words

MAGIC = b"TWRS"
VERSION = 2
_WITHOUT_WORDS = 1
TOKENS_MAX = 1 << 24
"""Maximum number of tokens in a vocabulary."""
_FIXED = struct.Struct("<4sBQ")
_CHECKSUM_BYTES = 16
_VOCABULARY_BYTES = 8


@dataclass(frozen=True, slots=True)
class Source:
    """The model that a session was held with, as far as its tokens go."""

    name: str
    """The name of its file, for messages."""
    hash: str
    """The fingerprint's `model_hash`; empty if several models have the tokenizer."""
    vocabulary: bytes
    """The hash of its vocabulary, 8 bytes (`codec.base.vocabulary_hash`)."""
    n_tokens: int
    tokenizer: TokenizerIdentity | None
    """None in files of version 1."""


@dataclass(frozen=True)
class TowerFile:
    """The content of a file."""

    source: Source
    history: History
    """Its stream ends where `written` begins, if there is one."""
    words: KeptVocabulary | None
    """What the ids stand for; None in files of version 1."""
    written: WrittenText | None = None
    """The ids that only the session's tokenizer can make."""

    def text(self) -> str:
        """The text of the current branch; of all branches, each after what it shares with those
        before, if there is a written text. TowerFileError if the file has no words."""
        if self.words is None:
            raise TowerFileError(
                "The .tower file has version 1, which holds no words: import it where "
                f"{self.source.name!r} is served to read it."
            )
        history = self.history
        if self.written is None:
            return self.words.text(history.ids(history.leaf))
        with _codec_errors():
            said = self.words.spell(history.stream) + self.written.spell(self.words)
        return said.decode("utf-8", "replace") + MEDIUM * bool(self.written.media)

    def whole(self, vocabulary: TokenVocabulary) -> History:
        """The history with all its ids. TowerFileError if this vocabulary, which is the session's,
        cuts the written text otherwise."""
        if self.written is None:
            return self.history
        with _codec_errors():
            rest = self.written.ids(vocabulary)
        if len(rest) and int(np.max(rest)) >= self.source.n_tokens:
            raise contradiction()
        return replace(self.history, stream=np.concatenate([self.history.stream, rest]))


def write(file: TowerFile) -> bytes:
    """The bytes of a file of version 2. Raises TowerFileError for a session that is too long or has
    ids of another vocabulary."""
    source, history = file.source, file.history
    assert source.tokenizer is not None
    assert file.words is not None
    check_size(history.turns)
    try:
        blob = pack_ids(history.stream, source.vocabulary, source.n_tokens)
    except ValueError as error:
        raise TowerFileError(f"The session cannot be exported: {error}") from error
    parts = [put_text(source.name[:NAME_CHARS_MAX]), put_text(source.hash), source.vocabulary]
    parts += [varint.put(source.n_tokens), put_text(source.tokenizer.pieces)]
    parts += [put_text(source.tokenizer.rules or ""), put_text(history.id)]
    parts += [bytes((history.named,)), put_text(history.title)]
    parts += [put_time(history.created), put_time(history.updated)]
    parts += [put_bases(history.bases), put_turns(history.turns), varint.put(history.leaf)]
    parts += [put_bytes(blob), put_words(sorted(_ids_of(file)), file.words)]
    parts.append(bytes((file.written is not None,)))
    parts += [] if file.written is None else [put_spelled(file.written)]
    body = b"".join(parts)
    n_bytes = _FIXED.size + len(body) + _CHECKSUM_BYTES
    data = _FIXED.pack(MAGIC, VERSION, n_bytes) + body
    return data + _checksum(data)


def read(data: bytes) -> TowerFile:
    """The content of a file, which need not be valid. Slow. Raises TowerFileError."""
    with _codec_errors():
        version, body = _checked(data)
        reader = VarintReader(body)
        source = _read_source(reader, version)
        file = _read_history(reader, source)
        if version > _WITHOUT_WORDS:
            file = _read_words(reader, file)
        reader.end()
        history = file.history
        n_written = 0 if file.written is None else file.written.n_ids
        if len(history.stream) + n_written != sum(turn.n - turn.n_shared for turn in history.turns):
            raise contradiction()
    return file


def _checked(data: bytes) -> tuple[int, bytes]:
    """The version, and the bytes between the header and the checksum, which is verified."""
    if not data.startswith(MAGIC[: len(data)]) or not data:
        raise TowerFileError("This is no .tower file: towerctl export writes them.")
    if len(data) < _FIXED.size + _CHECKSUM_BYTES:
        raise TowerFileError(f"The .tower file is truncated: it has only {len(data)} bytes.")
    _, version, n_bytes = _FIXED.unpack_from(data)
    if version > VERSION:
        raise TowerFileError(
            f"The .tower file has version {version}, and this towerd reads up to {VERSION}: "
            "update towerd."
        )
    if len(data) < n_bytes:
        raise TowerFileError(
            f"The .tower file is truncated: {len(data)} of its {n_bytes} bytes are here."
        )
    whole = len(data) == n_bytes and version >= _WITHOUT_WORDS
    if not whole or _checksum(data[:-_CHECKSUM_BYTES]) != data[-_CHECKSUM_BYTES:]:
        raise TowerFileError(
            "The .tower file is damaged, its checksum does not match: use another copy of it."
        )
    return version, data[_FIXED.size : -_CHECKSUM_BYTES]


def _read_source(reader: VarintReader, version: int) -> Source:
    name, hash = read_text(reader, NAME_CHARS_MAX), read_text(reader, NAME_CHARS_MAX)
    vocabulary, n_tokens = reader.take(_VOCABULARY_BYTES), reader.number(TOKENS_MAX + 1)
    tokenizer = None
    if version > _WITHOUT_WORDS:
        pieces, rules = read_text(reader, NAME_CHARS_MAX), read_text(reader, NAME_CHARS_MAX)
        if not pieces:
            raise contradiction()
        tokenizer = TokenizerIdentity(pieces, rules or None)
    return Source(name, hash, vocabulary, n_tokens, tokenizer)


def _read_history(reader: VarintReader, source: Source) -> TowerFile:
    id, named = read_text(reader, NAME_CHARS_MAX), read_flag(reader)
    title = read_text(reader, TITLE_CHARS_MAX)
    created, updated = read_time(reader), read_time(reader)
    bases, turns = read_bases(reader), read_turns(reader)
    leaf = reader.number(len(turns))
    check_size(turns)
    stream = packed_ids(read_bytes(reader), source.vocabulary, source.n_tokens)
    history = History(id, named, title, created, updated, leaf, turns, bases, stream)
    return TowerFile(source, history, None)


def _read_words(reader: VarintReader, file: TowerFile) -> TowerFile:
    known, words = read_words(reader, file.source.n_tokens)
    written = read_spelled(reader) if read_flag(reader) else None
    file = replace(file, words=words, written=written)
    if not known.issuperset(_ids_of(file)):
        raise contradiction()
    _check_text_size(file, words)
    return file


def _check_text_size(file: TowerFile, words: KeptVocabulary) -> None:
    """TowerFileError for a file whose words and ids make a text of more bytes than one may have. A
    branch repeats no part of the stream, so none is longer than it."""
    n_bytes = words.n_bytes(file.history.stream)
    if file.written is not None:
        text = file.written.text
        n_bytes += len(text.text) + words.n_bytes(np.array(text.others, np.int64))
        for kind, id in enumerate(text.kinds):
            n_marks = text.text.count(bytes((MARK_FIRST + kind,)))
            n_bytes += n_marks * words.n_bytes(np.array([id], np.int64))
    if n_bytes > TEXT_BYTES_MAX:
        raise TowerFileError(
            f"The .tower file stands for a text of {n_bytes} bytes, and {TEXT_BYTES_MAX} is the "
            "most that one may have."
        )


def _ids_of(file: TowerFile) -> set[int]:
    """The token ids that reading the file as text takes."""
    ids = set(np.unique(file.history.stream).tolist())
    if file.written is not None:
        ids |= {*file.written.text.kinds, *file.written.text.others}
    return {id for id in ids if id >= 0}


@contextmanager
def _codec_errors() -> Iterator[None]:
    """Turn the codec's errors into TowerFileError."""
    try:
        yield
    except CodecError as error:
        raise TowerFileError(f"The .tower file cannot be read: {error}") from error


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES).digest()
