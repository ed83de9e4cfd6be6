"""The blob: a header that says what is needed to decode it, the bits, and checksums.

    magic 4 | version 1 | form 1 | bytes in all, u32 | vocabulary hash 8 | ids hash 16
    varint: ids | varint: base ids | base hash 16, if there is a base
    model hash 8, if the form needs a model or table
    varint: chunks, then per chunk its symbols and the bytes of its committed coder output
    varint: bytes of side information | side information | coded chunks
    varint: 0, once the bytes of a fallback
    of version 2, varint: bytes of the media | the media among the ids (`media.py`)
    padding | BLAKE2b-64 of everything before

The checksum covers every byte, so a flipped byte is an error before anything is decoded. The hash
of the ids catches what a wrong model would decode. A blob without media has version 1, so that
earlier releases can read it. A reader allocates no more memory than the length of the blob
justifies: a blob has at least a byte for every IDS_PER_BYTE_MAX ids or symbols.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from towerd.codec import varint
from towerd.codec.base import IDS_MAX
from towerd.codec.errors import CodecError, Damaged, NewerVersion, Truncated, UnknownModel

MAGIC = b"TWRC"
VERSION = 2
_WITHOUT_MEDIA = 1
IDS_PER_BYTE_MAX = 1024
_FIXED = struct.Struct("<4sBBI8s16s")
_CHECKSUM_BYTES = 8
_MODEL_BYTES = 8
_BASE_BYTES = 16
BASE_HEAD_BYTES = _BASE_BYTES + 2
"""About how many bytes naming a base takes in a blob."""


@dataclass(frozen=True)
class Form:
    """One way to write ids as bits."""

    code: int
    name: str
    has_model: bool
    note: str
    n_ctx: int = 0
    """Tokens of a chunk that the model attends to; 0: as many as it was trained on."""


FORMS = (
    Form(0, "packed", False, "ids of ceil(log2 n) bits"),
    Form(1, "ranked", True, "ids in order of frequency, varint, zstd with a dictionary"),
    Form(2, "text", True, "text and its exceptions, zstd with a dictionary"),
    Form(3, "mix", True, "context mixing over the mini vocabulary, integer arithmetic"),
    Form(6, "network", True, "context mixing with the mini model's distribution"),
    Form(7, "network", True, "the same, with a short context of the mini model", 256),
)
"""Of two forms of one name the last is written, and both are read."""
RETIRED = {
    4: "the mini model's distribution as llama.cpp gave it on one machine",
    5: "a model's distribution as llama.cpp gave it on one machine",
}
"""Codes that must never be given to another form."""
BY_CODE = {form.code: form for form in FORMS}
BY_NAME = {form.name: form for form in FORMS}


@dataclass(frozen=True)
class CodedChunk:
    """Symbols (whatever the form codes one by one) with a coder of their own, and its output."""

    n_symbols: int
    bits: bytes


@dataclass(frozen=True)
class Blob:
    """A parsed blob. `base_ids` counts the ids that it is conditioned on."""

    form: Form
    vocabulary: bytes
    hash: bytes
    n_ids: int
    chunks: tuple[CodedChunk, ...]
    side: bytes = b""
    base_ids: int = 0
    base_hash: bytes = b""
    model: bytes = b""
    media: bytes = b""
    """The media, which are not coded; empty if all ids are tokens."""


def write(blob: Blob) -> bytes:
    """The bytes of a blob."""
    parts = [varint.put(blob.n_ids), varint.put(blob.base_ids)]
    parts += [blob.base_hash, blob.model, varint.put(len(blob.chunks))]
    parts += [varint.put_all((chunk.n_symbols, len(chunk.bits))) for chunk in blob.chunks]
    parts += [varint.put(len(blob.side)), blob.side, *(chunk.bits for chunk in blob.chunks)]
    parts += [varint.put(0)]
    if blob.media:
        parts += [varint.put(len(blob.media)), blob.media]
    version = VERSION if blob.media else _WITHOUT_MEDIA
    body = b"".join(parts)
    n_bytes = _FIXED.size + len(body) + _CHECKSUM_BYTES
    n_most = max(blob.n_ids, sum(chunk.n_symbols for chunk in blob.chunks))
    padding = max(0, -(-n_most // IDS_PER_BYTE_MAX) - n_bytes)
    head = (MAGIC, version, blob.form.code, n_bytes + padding, blob.vocabulary, blob.hash)
    data = _FIXED.pack(*head) + body + bytes(padding)
    return data + _checksum(data)


def read(data: bytes) -> Blob:
    """Parse and check a blob from an untrusted source.

    Raises Truncated, NewerVersion or Damaged; decodes nothing."""
    form, version, vocabulary, hash_ = _read_fixed(data)
    reader = varint.VarintReader(data[_FIXED.size : -_CHECKSUM_BYTES])
    n_ids = reader.number(IDS_MAX + 1)
    if n_ids > len(data) * IDS_PER_BYTE_MAX:
        raise Damaged(f"The blob is damaged: {len(data)} bytes cannot hold {n_ids} ids.")
    base_ids = reader.number()
    base_hash = reader.take(_BASE_BYTES if base_ids else 0)
    model = reader.take(_MODEL_BYTES if form.has_model else 0)
    n_chunks = reader.number(len(data))
    sizes = reader.numbers(2 * n_chunks)
    side = reader.take(reader.number())
    bits = [reader.take(n) for n in sizes[1::2]]
    if reader.number():
        raise Damaged("The blob is damaged: its form has no fallback.")
    media = reader.take(reader.number()) if version > _WITHOUT_MEDIA else b""
    if any(reader.rest()):
        raise Damaged("The blob is damaged: its padding is not empty.")
    if sum(sizes[::2]) > len(data) * IDS_PER_BYTE_MAX:
        raise Damaged(f"The blob is damaged: {len(data)} bytes cannot hold that many symbols.")
    chunks = tuple(map(CodedChunk, sizes[::2], bits))
    return Blob(form, vocabulary, hash_, n_ids, chunks, side, base_ids, base_hash, model, media)


def claimed_hash(data: bytes) -> bytes:
    """The hash of its ids that a blob states, even if it is damaged; b"" if it is too short.
    Ids with this hash are the ids of the blob."""
    if len(data) < _FIXED.size:
        return b""
    found: bytes = _FIXED.unpack_from(data)[-1]
    return found


def claimed_vocabulary(data: bytes) -> bytes:
    """The hash of the vocabulary that a blob states, even if it is damaged; b"" if it is too short."""
    if len(data) < _FIXED.size:
        return b""
    found: bytes = _FIXED.unpack_from(data)[-2]
    return found


def _read_fixed(data: bytes) -> tuple[Form, int, bytes, bytes]:
    if not data.startswith(MAGIC[: len(data)]):
        raise Damaged("The blob is damaged: it does not start like one.")
    if len(data) < _FIXED.size + _CHECKSUM_BYTES:
        raise Truncated(f"The blob is truncated: {len(data)} bytes are less than a header.")
    _, version, code, n_bytes, vocabulary, hash_ = _FIXED.unpack_from(data)
    if version > VERSION:
        raise NewerVersion(
            f"The blob has version {version} and this towerd reads up to {VERSION}: update towerd."
        )
    if len(data) < n_bytes:
        raise Truncated(f"The blob is truncated: {len(data)} of {n_bytes} bytes are here.")
    if len(data) > n_bytes or _checksum(data[:-_CHECKSUM_BYTES]) != data[-_CHECKSUM_BYTES:]:
        raise Damaged("The blob is damaged: its checksum does not match; restore it from a copy.")
    if version >= _WITHOUT_MEDIA and code in RETIRED:
        raise UnknownModel(
            f"The blob is in a form that is no longer read, with {RETIRED[code]}: read it with the "
            "towerd that wrote it."
        )
    if version < _WITHOUT_MEDIA or code not in BY_CODE:
        raise CodecError(f"Nothing here reads version {version}, form {code} of the format.")
    return BY_CODE[code], version, vocabulary, hash_


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES).digest()
