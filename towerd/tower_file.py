"""The `.tower` file: one session's whole history, readable as text by anyone and as tokens wherever a
model with the same vocabulary is served.

    magic 4 | version 1 | bytes up to the end of the checksum, u64
    text: model | text: hash of the model's file | vocabulary hash 8 | varint: its tokens
    of version 2, the tokenizer identity: text: hash of its tokens | text: hash of its rules
    text: session id | named 1 | text: title | created, updated: f64
    varint: bases, then per base its name, level, tokens and digest 32
    varint: turns, then per turn
        varints: turns back to its parent, turns back to its origin (0: none), tokens shared with
            the origin, tokens of the prompt, of the reply, and how many of both had rows
        started, created: f64 | finished 1
    varint: place of the current leaf
    varint: bytes of the blob | the blob (`towerd.codec`, of the form that every machine reads)
    of version 2
        the words (`put_words`): what each token id in the file stands for
        spelled 1 | if it is spelled, the text that follows the blob (`put_spelled`)
    of version 3
        varint: files of pictures and sounds, per file its BLAKE2b-128 16 and its bytes
        varint: media, per medium its key 16 (`medium_key`), its file's place, and which of the media it is that
            are made of the file
    BLAKE2b-128 of everything before
    of version 3, the files, one behind the other

Numbers are little-endian or varints (`codec/varint.py`); a text is its length and UTF-8. The blob
holds the token ids that each turn adds to its origin, in order (`store/sessions/history.py`), in
the form that needs no table, so that later releases can read the file whatever tables they have.
The ids of a session that was frozen under another tokenizer cannot be had without it: its text goes
into the file instead, with what corrects it, and a reader that has the tokenizer has the ids again.

The reader trusts no byte: nothing is decoded before the checksum was verified, and no more memory is
allocated than the bytes justify. Files of version 1 have no words. Without media a file has version 2, which earlier
releases read. A picture or sound that is damaged, or cut off the file's end, is left out: the conversation is whole without it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import zstandard

from towerd.codec import varint
from towerd.codec.base import IDS_MAX, TokenVocabulary
from towerd.codec.codec import WrittenText, pack_ids, packed_ids
from towerd.codec.errors import CodecError
from towerd.codec.text import MARK_FIRST, parse
from towerd.codec.varint import VarintReader
from towerd.errors import InvalidRequest
from towerd.store.catalog.identity import TokenizerIdentity
from towerd.store.catalog.vocabularies import MEDIUM, TEXT_BYTES_MAX, KeptVocabulary, some_words
from towerd.store.sessions.history import MEDIA_MAX, History, NamedBase, PastTurn, media_keys
from towerd.store.sessions.media import FILE_BYTES_MAX, KEY_BYTES, SentMedium, file_digest
from towerd.store.sessions.sessions import NAME_CHARS_MAX, TITLE_CHARS_MAX

TURNS_MAX = 4096
"""Maximum number of turns; the store's lock is held while they are entered."""
SECONDS_MAX = 1e11
_TIME = struct.Struct("<d")
_UTF8_BYTES = 4
_RATIO_MAX = 256
"""Maximum of bytes that one compressed byte may stand for."""
COMPRESSED_BYTES_MAX = 1 << 26
"""Maximum of the bytes that are compressed as one."""
_LEVEL = 12
_WINDOW_BYTES_MAX = 1 << 23
TURN_IDS_MAX = 1 << 28
"""Maximum number of token ids of all turns together, each counted with its whole prompt."""
_TURN_NUMBERS = 6
_DIGEST_BYTES = 32
WORD_BYTES_MAX = 1024
"""Maximum of a piece's or name's bytes; known vocabularies have up to some hundred."""
_HASH_BYTES = 16
MAGIC = b"TWRS"
VERSION = 3
_WITHOUT_WORDS, _WITHOUT_MEDIA = 1, 2
TOKENS_MAX = 1 << 24
"""Maximum number of tokens in a vocabulary."""
_FIXED = struct.Struct("<4sBQ")
_CHECKSUM_BYTES = 16
_VOCABULARY_BYTES = 8


class TowerFileError(InvalidRequest):
    """The file cannot be read here; the message says what is wrong or missing."""


def contradiction() -> TowerFileError:
    """The error for a file whose checksum is right and whose content cannot be."""
    return TowerFileError(
        "The .tower file is damaged, its parts contradict each other: use another copy of it."
    )


def put_text(text: str) -> bytes:
    """A text: its length and UTF-8."""
    return put_bytes(text.encode())


def read_text(reader: VarintReader, chars_max: int) -> str:
    """A text of at most `chars_max` characters."""
    try:
        text = reader.take(reader.number(chars_max * _UTF8_BYTES + 1)).decode()
    except UnicodeDecodeError:
        raise contradiction() from None
    if len(text) > chars_max:
        raise contradiction()
    return text


def put_bytes(data: bytes) -> bytes:
    """Bytes after their length."""
    return varint.put(len(data)) + data


def read_bytes(reader: VarintReader) -> bytes:
    """The inverse of `put_bytes`."""
    return reader.take(reader.number())


def put_time(unix_s: float) -> bytes:
    """A moment: f64."""
    return _TIME.pack(unix_s)


def read_time(reader: VarintReader) -> float:
    """A moment that can be one."""
    (value,) = _TIME.unpack(reader.take(_TIME.size))
    if not math.isfinite(value) or not 0 <= value <= SECONDS_MAX:
        raise contradiction()
    return float(value)


def read_flag(reader: VarintReader) -> bool:
    """A byte that is 0 or 1."""
    byte = reader.take(1)[0]
    if byte > 1:
        raise contradiction()
    return bool(byte)


def put_compressed(data: bytes) -> bytes:
    """varint: bytes of the data | its zstd frame after its length; or the data itself, if that is
    shorter or the frame would stand for too many bytes. TowerFileError for too much."""
    if len(data) > COMPRESSED_BYTES_MAX:
        raise TowerFileError(
            f"The session has a text of {len(data)} bytes, and a .tower file holds up to "
            f"{COMPRESSED_BYTES_MAX}."
        )
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
    if not len(frame) < len(data) <= _RATIO_MAX * len(frame):
        frame = data
    return varint.put(len(data)) + put_bytes(frame)


def read_compressed(reader: VarintReader) -> bytes:
    """The inverse of `put_compressed`; allocates no more than the bytes justify."""
    n_bytes, frame = reader.number(COMPRESSED_BYTES_MAX + 1), read_bytes(reader)
    if n_bytes == len(frame):
        return frame
    if n_bytes > _RATIO_MAX * len(frame):
        raise contradiction()
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
    try:
        with decompressor.stream_reader(frame) as stream:
            data = stream.read(n_bytes + 1)
    except zstandard.ZstdError as error:
        raise contradiction() from error
    if len(data) != n_bytes:
        raise contradiction()
    return data


def put_bases(bases: tuple[NamedBase, ...]) -> bytes:
    """The bases that the current branch begins with."""
    parts = [varint.put(len(bases))]
    for base in bases:
        parts += [put_text(base.name), varint.put_all((base.level, base.n_tokens)), base.digest]
    return b"".join(parts)


def read_bases(reader: VarintReader) -> tuple[NamedBase, ...]:
    """The inverse of `put_bases`."""
    found = []
    for _ in range(reader.number()):
        name, (level, n_tokens) = read_text(reader, NAME_CHARS_MAX), reader.numbers(2)
        found.append(NamedBase(name, level, n_tokens, reader.take(_DIGEST_BYTES)))
    return tuple(found)


def put_turns(turns: tuple[PastTurn, ...]) -> bytes:
    """The facts of each turn."""
    parts = [varint.put(len(turns))]
    for place, turn in enumerate(turns):
        parent = 0 if turn.parent is None else place - turn.parent
        numbers = (parent, place - turn.origin, turn.n_shared)
        counts = (turn.n_prompt, turn.n_reply, turn.n_cached)
        times = put_time(turn.started) + put_time(turn.created)
        parts.append(varint.put_all(numbers + counts) + times + bytes((turn.finished,)))
    return b"".join(parts)


def read_turns(reader: VarintReader) -> tuple[PastTurn, ...]:
    """The turns, checked to refer only to earlier turns and to tokens that these have."""
    turns: list[PastTurn] = []
    for place in range(reader.number(TURNS_MAX + 1)):
        parent, origin, n_shared, n_prompt, n_reply, n_cached = reader.numbers(_TURN_NUMBERS)
        before = place - parent if parent else None
        counts = n_prompt, n_reply, n_cached
        started, created, finished = read_time(reader), read_time(reader), read_flag(reader)
        turn = PastTurn(before, place - origin, n_shared, *counts, started, created, finished)
        n_there = turns[turn.origin].n if 0 < origin <= place else 0
        if max(parent, origin) > place or not 0 < turn.n <= IDS_MAX:
            raise contradiction()
        if turn.n_shared > min(turn.n, n_there) or turn.n_cached > turn.n:
            raise contradiction()
        turns.append(turn)
    if not turns:
        raise contradiction()
    return tuple(turns)


def check_size(turns: tuple[PastTurn, ...]) -> None:
    """TowerFileError for more than a file holds."""
    n_ids = sum(turn.n for turn in turns)
    if len(turns) > TURNS_MAX or n_ids > TURN_IDS_MAX:
        raise TowerFileError(
            f"The session has {len(turns)} turns with {n_ids} tokens, and a .tower file holds up "
            f"to {TURNS_MAX} turns and {TURN_IDS_MAX} tokens."
        )


def put_words(ids: Iterable[int], vocabulary: KeptVocabulary) -> bytes:
    """What each of `ids`, ascending and all in the vocabulary, stands for, compressed:

    varint: ids | per id a varint, its difference to the one before | per id a varint, twice the
    bytes of its piece or name, plus 1 for a control token | the pieces and names"""
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


def put_spelled(written: WrittenText) -> bytes:
    """Ids that could not be made when the file was written, as their text and what corrects it:

    varint: ids | hash of the ids 16 | side information (`codec/text.py`) and media
    (`codec/media.py`), each after its length | compressed: the text"""
    head = varint.put(written.n_ids) + written.hash
    side = put_bytes(written.text.side()) + put_bytes(written.media)
    return head + side + put_compressed(written.text.text)


def read_spelled(reader: VarintReader) -> WrittenText:
    """The inverse of `put_spelled`."""
    n_ids, hash = reader.number(IDS_MAX + 1), reader.take(_HASH_BYTES)
    side, media = read_bytes(reader), read_bytes(reader)
    return WrittenText(parse(read_compressed(reader), side), n_ids, hash, media)


@dataclass(frozen=True, slots=True)
class CarriedMedium:
    """A medium whose file is behind the session."""

    key: bytes
    ordinal: int
    digest: bytes
    """Of its file."""
    n_bytes: int


def file_sizes(media: Iterable[CarriedMedium]) -> dict[bytes, int]:
    """Bytes of each file, by digest, in their order."""
    return {each.digest: each.n_bytes for each in media}


def put_media(media: tuple[CarriedMedium, ...]) -> bytes:
    """What the files are, and which media are made of each."""
    sizes = file_sizes(media)
    places = {digest: place for place, digest in enumerate(sizes)}
    parts = [varint.put(len(sizes))]
    parts += [digest + varint.put(n_bytes) for digest, n_bytes in sizes.items()]
    parts.append(varint.put(len(media)))
    parts += [each.key + varint.put_all((places[each.digest], each.ordinal)) for each in media]
    return b"".join(parts)


def read_media(reader: VarintReader) -> tuple[CarriedMedium, ...]:
    """The inverse of `put_media`. No medium and no file is there twice, and each file is some medium's."""
    files: list[tuple[bytes, int]] = []
    for _ in range(reader.number(MEDIA_MAX + 1)):
        files.append((reader.take(KEY_BYTES), reader.number(FILE_BYTES_MAX + 1)))
    media = []
    for _ in range(reader.number(MEDIA_MAX + 1)):
        key, (place, ordinal) = reader.take(KEY_BYTES), reader.numbers(2)
        if place >= len(files) or ordinal >= MEDIA_MAX:
            raise contradiction()
        media.append(CarriedMedium(key, ordinal, *files[place]))
    sizes = file_sizes(media)
    is_once = len({each.key for each in media}) == len(media) and list(sizes.items()) == files
    if not media or not is_once or not all(sizes.values()):
        raise contradiction()
    return tuple(media)


@dataclass(frozen=True, slots=True)
class Source:
    """The model that a session was held with, as far as its tokens go."""

    name: str
    """The name of its file, for messages."""
    hash: str
    """The `model_hash` of the row identity; empty if several models have the tokenizer."""
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
    media: tuple[CarriedMedium, ...] = ()
    files: Mapping[bytes, bytes] = field(default_factory=dict)
    """By digest, those that are here and undamaged."""

    def sent(self) -> list[SentMedium]:
        """The media whose files are here."""
        return [
            SentMedium(each.key, self.files[each.digest], each.ordinal)
            for each in self.media
            if each.digest in self.files
        ]

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
    """The bytes of a file up to those of its media, which follow in the order of `file_sizes`. Raises TowerFileError
    for a session that is too long or has ids of another vocabulary."""
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
    parts += [put_media(file.media)] if file.media else []
    body = b"".join(parts)
    n_bytes = _FIXED.size + len(body) + _CHECKSUM_BYTES
    data = _FIXED.pack(MAGIC, VERSION if file.media else _WITHOUT_MEDIA, n_bytes) + body
    return data + _checksum(data)


def without_media(data: bytes) -> bytes:
    """A file without the pictures and sounds behind its session. What is no file stays as it is."""
    if len(data) < _FIXED.size or not data.startswith(MAGIC):
        return data
    return data[: _FIXED.unpack_from(data)[2]]


def read(data: bytes) -> TowerFile:
    """The content of a file, which need not be valid. Slow. Raises TowerFileError."""
    with _codec_errors():
        version, session, behind = _checked(data)
        reader = VarintReader(session)
        source = _read_source(reader, version)
        file = _read_history(reader, source)
        if version > _WITHOUT_WORDS:
            file = _read_words(reader, file)
        if version > _WITHOUT_MEDIA:
            file = replace(file, media=read_media(reader))
        reader.end()
        history = file.history
        n_written = 0 if file.written is None else file.written.n_ids
        if len(history.stream) + n_written != sum(turn.n - turn.n_shared for turn in history.turns):
            raise contradiction()
        if file.media and file.written is None:
            if not {each.key for each in file.media} <= media_keys(history):
                raise contradiction()
    return replace(file, files=_files(file.media, behind))


def _files(media: tuple[CarriedMedium, ...], behind: memoryview) -> dict[bytes, bytes]:
    """The undamaged files among these bytes. TowerFileError for more than the media have."""
    found, at = {}, 0
    for digest, n_bytes in file_sizes(media).items():
        data = behind[at : at + n_bytes]
        at += n_bytes
        if len(data) == n_bytes and file_digest(data) == digest:
            found[digest] = bytes(data)
    if at < len(behind):
        raise TowerFileError(
            f"The .tower file is damaged: its pictures and sounds have {at} bytes, and {len(behind)} are "
            "here: use another copy of it."
        )
    return found


def _checked(data: bytes) -> tuple[int, bytes, memoryview]:
    """The version, the bytes between the header and the checksum, which is verified, and those behind it."""
    if not data.startswith(MAGIC[: len(data)]) or not data:
        raise TowerFileError("This is not a .tower file: towerctl export writes them.")
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
    whole = len(data) == n_bytes or (len(data) > n_bytes and version > _WITHOUT_MEDIA)
    end = n_bytes - _CHECKSUM_BYTES
    view = memoryview(data)
    is_sound = whole and version >= _WITHOUT_WORDS and end >= _FIXED.size
    if not is_sound or _checksum(view[:end]) != view[end:n_bytes]:
        raise TowerFileError(
            "The .tower file is damaged, its checksum does not match: use another copy of it."
        )
    return version, bytes(view[_FIXED.size : end]), view[n_bytes:]


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


def _checksum(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES).digest()
