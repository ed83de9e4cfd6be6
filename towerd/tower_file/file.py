"""The `.tower` file: one session's whole history, readable wherever a model with the same vocabulary is served.

    magic 4 | version 1 | bytes in all, u64
    text: model | text: hash of the model's file | vocabulary hash 8 | varint: its tokens
    text: session id | named 1 | text: title | created, updated: f64
    varint: bases, then per base its name, level, tokens and digest 32
    varint: turns, then per turn
        varints: turns back to its parent, turns back to its origin (0: none), tokens shared with
            the origin, tokens of the prompt, of the reply, and how many of both had rows
        started, created: f64 | finished 1
    varint: place of the current leaf
    varint: bytes of the blob | the blob (`towerd.codec`, a form that every machine reads)
    BLAKE2b-128 of everything before

Numbers are little-endian or varints (`codec/varint.py`); a text is its length and UTF-8. The blob
holds the token ids that each turn adds to its origin, in order (`store/sessions/history.py`), in
the form that needs no table, so that later releases can read the file whatever tables they have.
The reader trusts no byte: nothing is decoded before the checksum and the model have been verified,
and no more memory is allocated than the bytes justify.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from towerd.codec import varint
from towerd.codec.base import IDS_MAX
from towerd.codec.errors import CodecError
from towerd.errors import InvalidRequest
from towerd.store.sessions.history import History, NamedBase, PastTurn
from towerd.store.sessions.sessions import NAME_CHARS_MAX, TITLE_CHARS_MAX
from towerd.tokens import Ids

if TYPE_CHECKING:
    from towerd.codec import Codec

MAGIC = b"TWRS"
VERSION = 1
TURNS_MAX = 4096
"""Maximum number of turns; the store's lock is held while they are entered."""
TURN_IDS_MAX = 1 << 28
"""Maximum number of token ids of all turns together, each counted with its whole prompt."""
SECONDS_MAX = 1e11
_FIXED = struct.Struct("<4sBQ")
_TIME = struct.Struct("<d")
_TURN_NUMBERS = 6
_CHECKSUM_BYTES = 16
_VOCABULARY_BYTES = 8
_DIGEST_BYTES = 32
_UTF8_BYTES = 4


class TowerFileError(InvalidRequest):
    """The file cannot be read here; the message says what is wrong or missing."""


@dataclass(frozen=True, slots=True)
class SessionModel:
    """The model whose token ids the sessions consist of."""

    name: str
    """The file name, for messages."""
    hash: str
    """The fingerprint's `model_hash`."""
    codec: Codec
    """The codec of the model's vocabulary."""


def write(history: History, model: SessionModel) -> bytes:
    """The bytes of a session. Slow, because the ids are decoded again and compared.

    Raises TowerFileError for a session that is too long or has ids of another vocabulary."""
    _check_size(history.turns)
    try:
        blob = model.codec.encode(history.stream, form="packed")
    except ValueError as error:
        raise TowerFileError(f"The session cannot be exported: {error}") from error
    n_tokens = len(model.codec.vocabulary.pieces)
    parts = [_text(model.name[:NAME_CHARS_MAX]), _text(model.hash), model.codec.vocabulary_hash]
    parts += [varint.put(n_tokens), _text(history.id), bytes((history.named,))]
    parts += [_text(history.title), _TIME.pack(history.created), _TIME.pack(history.updated)]
    parts.append(varint.put(len(history.bases)))
    for base in history.bases:
        parts += [_text(base.name), varint.put_all((base.level, base.n_tokens)), base.digest]
    parts.append(varint.put(len(history.turns)))
    parts += [_turn(place, turn) for place, turn in enumerate(history.turns)]
    parts += [varint.put(history.leaf), varint.put(len(blob)), blob]
    body = b"".join(parts)
    n_bytes = _FIXED.size + len(body) + _CHECKSUM_BYTES
    data = _FIXED.pack(MAGIC, VERSION, n_bytes) + body
    return data + _checksum(data)


def read(data: bytes, model: SessionModel) -> History:
    """The session in the bytes of a file, which need not be valid. Slow. Raises TowerFileError."""
    with _codec_errors():
        reader = varint.VarintReader(_checked(data))
        _check_model(reader, model)
        id, named = _read_text(reader, NAME_CHARS_MAX), _read_flag(reader)
        title = _read_text(reader, TITLE_CHARS_MAX)
        created, updated = _read_time(reader), _read_time(reader)
        bases = _read_bases(reader)
        turns = _read_turns(reader)
        leaf = reader.number(len(turns))
        blob = reader.take(reader.number())
        reader.end()
        _check_size(turns)
        stream = _decode(blob, turns, model.codec)
    return History(id, named, title, created, updated, leaf, turns, bases, stream)


def _checked(data: bytes) -> bytes:
    """The bytes between the header and the checksum, which is verified."""
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
    whole = len(data) == n_bytes and version == VERSION
    if not whole or _checksum(data[:-_CHECKSUM_BYTES]) != data[-_CHECKSUM_BYTES:]:
        raise TowerFileError(
            "The .tower file is damaged, its checksum does not match: use another copy of it."
        )
    return data[_FIXED.size : -_CHECKSUM_BYTES]


def _check_model(reader: varint.VarintReader, model: SessionModel) -> None:
    """Raises TowerFileError for ids of another vocabulary."""
    name = _read_text(reader, NAME_CHARS_MAX)
    _read_text(
        reader, NAME_CHARS_MAX
    )  # the hash of its weights, which rows depend on, tokens do not
    vocabulary, n_tokens = reader.take(_VOCABULARY_BYTES), reader.number()
    codec = model.codec
    if vocabulary != codec.vocabulary_hash:
        raise TowerFileError(
            f"The session is of {name!r}, whose vocabulary ({n_tokens} tokens, "
            f"{vocabulary.hex()}) is not that of {model.name!r} here "
            f"({len(codec.vocabulary.pieces)} tokens, {codec.vocabulary_hash.hex()}): serve "
            f"{name!r} to import it."
        )


def _read_bases(reader: varint.VarintReader) -> tuple[NamedBase, ...]:
    found = []
    for _ in range(reader.number()):
        name, (level, n_tokens) = _read_text(reader, NAME_CHARS_MAX), reader.numbers(2)
        found.append(NamedBase(name, level, n_tokens, reader.take(_DIGEST_BYTES)))
    return tuple(found)


def _turn(place: int, turn: PastTurn) -> bytes:
    """The bytes of one turn in the file."""
    parent = 0 if turn.parent is None else place - turn.parent
    numbers = (
        parent,
        place - turn.origin,
        turn.n_shared,
        turn.n_prompt,
        turn.n_reply,
        turn.n_cached,
    )
    times = _TIME.pack(turn.started) + _TIME.pack(turn.created)
    return varint.put_all(numbers) + times + bytes((turn.finished,))


def _read_turns(reader: varint.VarintReader) -> tuple[PastTurn, ...]:
    """The turns, checked to refer only to earlier turns and to tokens that these have."""
    turns: list[PastTurn] = []
    for place in range(reader.number(TURNS_MAX + 1)):
        parent, origin, n_shared, n_prompt, n_reply, n_cached = reader.numbers(_TURN_NUMBERS)
        turn = PastTurn(
            place - parent if parent else None,
            place - origin,
            n_shared,
            n_prompt,
            n_reply,
            n_cached,
            _read_time(reader),
            _read_time(reader),
            _read_flag(reader),
        )
        n_there = turns[turn.origin].n if 0 < origin <= place else 0
        if max(parent, origin) > place or not 0 < turn.n <= IDS_MAX:
            raise _contradiction()
        if turn.n_shared > min(turn.n, n_there) or turn.n_cached > turn.n:
            raise _contradiction()
        turns.append(turn)
    if not turns:
        raise _contradiction()
    return tuple(turns)


def _decode(blob: bytes, turns: tuple[PastTurn, ...], codec: Codec) -> Ids:
    """The ids of the blob, checked to be as many as the turns add and within the vocabulary."""
    stream = codec.decode(blob)
    n_tokens = len(codec.vocabulary.pieces)
    if len(stream) != sum(turn.n - turn.n_shared for turn in turns):
        raise _contradiction()
    if len(stream) and int(np.max(stream)) >= n_tokens:
        raise _contradiction()
    return stream


def _check_size(turns: tuple[PastTurn, ...]) -> None:
    n_ids = sum(turn.n for turn in turns)
    if len(turns) > TURNS_MAX or n_ids > TURN_IDS_MAX:
        raise TowerFileError(
            f"The session has {len(turns)} turns with {n_ids} tokens, and a .tower file holds up "
            f"to {TURNS_MAX} turns and {TURN_IDS_MAX} tokens."
        )


@contextmanager
def _codec_errors() -> Iterator[None]:
    """Turn the codec's errors into TowerFileError."""
    try:
        yield
    except CodecError as error:
        raise TowerFileError(f"The .tower file cannot be read: {error}") from error


def _contradiction() -> TowerFileError:
    return TowerFileError(
        "The .tower file is damaged, its parts contradict each other: use another copy of it."
    )


def _text(text: str) -> bytes:
    data = text.encode()
    return varint.put(len(data)) + data


def _read_text(reader: varint.VarintReader, chars_max: int) -> str:
    try:
        text = reader.take(reader.number(chars_max * _UTF8_BYTES + 1)).decode()
    except UnicodeDecodeError:
        raise _contradiction() from None
    if len(text) > chars_max:
        raise _contradiction()
    return text


def _read_time(reader: varint.VarintReader) -> float:
    (value,) = _TIME.unpack(reader.take(_TIME.size))
    if not math.isfinite(value) or not 0 <= value <= SECONDS_MAX:
        raise _contradiction()
    return float(value)


def _read_flag(reader: varint.VarintReader) -> bool:
    byte = reader.take(1)[0]
    if byte > 1:
        raise _contradiction()
    return bool(byte)


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES).digest()
