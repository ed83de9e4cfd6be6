"""The vocabularies of tokenizers whose conversations a store has, so that these stay readable as text
whichever model is served.

    tokenizers/DIGEST.vocab:  magic 4 | version 1 | BLAKE2b-128 of the rest | zstd of msgpack
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zstandard

from towerd.codec.errors import UnknownModel
from towerd.errors import StoreError
from towerd.store.segments import durable
from towerd.tokens import Ids

MAGIC = b"TWRV"
VERSION = 1
BYTES_MAX = 1 << 28
"""Maximum of a vocabulary's bytes; that of 262,144 tokens takes four million."""
MEDIUM = "<__media__>"
"""Stands in a text for a picture or a sound."""
_HEAD = struct.Struct("<4sB16s")


@dataclass(frozen=True, slots=True)
class KeptVocabulary:
    """What each token of a tokenizer stands for."""

    pieces: Sequence[bytes]
    """Bytes of each id as text; b"" for control tokens."""
    names: Sequence[bytes]
    """How each control token is written; b"" for the others."""

    def tokenize(self, text: bytes) -> Ids:
        """Raises UnknownModel: how text is cut into tokens is not kept."""
        raise UnknownModel("This conversation is read as text only: serve its model to thaw it.")

    def text(self, ids: Ids) -> str:
        """The text of token ids, control tokens as they are written, media as MEDIUM."""
        return self.spell(ids).decode("utf-8", "replace")

    def spell(self, ids: Ids) -> bytes:
        """The bytes of `text`, which need not end with a whole character."""
        parts: list[bytes] = []
        for id in ids.tolist():
            if 0 <= id < len(self.pieces):
                parts.append(self.pieces[id] or self.names[id])
            elif id < 0 and parts[-1:] != [MEDIUM.encode()]:
                parts.append(MEDIUM.encode())
        return b"".join(parts)


class Vocabularies:
    """The kept vocabularies of a store, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, digest: bytes) -> bool:
        """Whether the vocabulary of a tokenizer identity is kept."""
        return self._path(digest).is_file()

    def keep(self, digest: bytes, vocabulary: KeptVocabulary) -> None:
        """Write a vocabulary durably, whole or not at all. Raises DiskFull or StoreError."""
        body = msgspec.msgpack.encode([list(vocabulary.pieces), list(vocabulary.names)])
        packed = zstandard.ZstdCompressor().compress(body)
        data = _HEAD.pack(MAGIC, VERSION, _checksum(packed)) + packed
        half = self.folder / f"{secrets.token_hex(8)}.tmp"
        with durable.store_errors("a vocabulary cannot be kept"):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            for left in self.folder.glob("*.tmp"):  # by a kill
                left.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with open(os.open(half, flags, 0o600), "wb") as file:
                    file.write(data)
                    file.flush()
                    durable.sync(file.fileno())
                half.rename(self._path(digest))
            except BaseException:
                half.unlink(missing_ok=True)
                raise
            durable.sync_dir(self.folder)

    def read(self, digest: bytes) -> KeptVocabulary:
        """A kept vocabulary. Raises StoreError if it is not kept, or is damaged; it is then set
        aside, and written anew when its model is served."""
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            message = (
                "The vocabulary of this conversation is not kept here, because its model was last "
                "served by an earlier towerd: serve its model once."
            )
            raise StoreError(message, public=message) from error
        try:
            magic, version, expected = _HEAD.unpack_from(data)
            packed = data[_HEAD.size :]
            if (magic, version, expected) != (MAGIC, VERSION, _checksum(packed)):
                raise ValueError("checksum")
            body = zstandard.ZstdDecompressor().decompress(packed, max_output_size=BYTES_MAX)
            pieces, names = msgspec.msgpack.decode(body, type=tuple[list[bytes], list[bytes]])
        except (ValueError, struct.error, zstandard.ZstdError, msgspec.MsgspecError) as error:
            with suppress(OSError):  # another reader has just done it
                path.replace(path.with_suffix(".damaged"))
            message = (
                "The kept vocabulary of this conversation is damaged and was set aside: serve its "
                "model once, which keeps it anew."
            )
            raise StoreError(message, public=message) from error
        return KeptVocabulary(pieces, names)

    def _path(self, digest: bytes) -> Path:
        return self.folder / f"{digest.hex()}.vocab"


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
