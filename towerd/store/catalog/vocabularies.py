"""The vocabularies of tokenizers whose conversations a store has, so that these stay readable as text
whichever model is served.

    tokenizers/DIGEST.vocab:  magic 4 | version 1 | BLAKE2b-128 of the name and the rest, so that no
                              file takes the place of another (in version 1 of the rest alone) |
                              zstd of msgpack
    tokenizers/DIGEST.TENANT.words:  the same, of a tokenizer that was never served here: what the
                              tokens of the conversations that this tenant (a hash of its name)
                              imported stand for. No tenant reads another's: which tokens are known
                              tells what was said, and nobody can check what they stand for.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec
import numpy as np
import zstandard

from towerd.codec.base import vocabulary_hash
from towerd.codec.errors import UnknownModel
from towerd.errors import InvalidRequest, NotSupported, StoreError
from towerd.slots.errors import StateError
from towerd.slots.row_identity import tokenizer_hash
from towerd.store.catalog.identity import TokenizerIdentity
from towerd.store.files import durable
from towerd.store.files.file_map import PLAIN_FILES, StoreFiles
from towerd.store.tree.scope import tenant_of
from towerd.system.folders import folder_locked
from towerd.tokens import Ids

MAGIC = b"TWRV"
VERSION = 2
VERSION_NAMELESS = 1
BYTES_MAX = 1 << 28
"""Maximum of a vocabulary's bytes; that of 262,144 tokens takes four million."""
TEXT_BYTES_MAX = 1 << 26
"""Maximum of the bytes of a conversation's text: words of an imported one may be long, and its ids
many."""
MEDIUM = "<__media__>"
"""Stands in a text for a picture or a sound."""
_TENANT_BYTES = 16
_DIGEST = re.compile("[0-9a-f]{64}")
_HEAD = struct.Struct("<4sB16s")
T = TypeVar("T")


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

    def n_bytes(self, ids: Ids) -> int:
        """The bytes that token ids stand for, without media."""
        known = ids[(ids >= 0) & (ids < len(self.pieces))]
        each, counts = np.unique(known, return_counts=True)
        both = zip(each.tolist(), counts.tolist(), strict=True)
        return sum(len(self.pieces[id] or self.names[id]) * n for id, n in both)

    def check_size(self, ids: Ids) -> None:
        """Raises NotSupported if the text of token ids is too long to be made."""
        n_bytes = self.n_bytes(ids)
        if n_bytes > TEXT_BYTES_MAX:
            raise NotSupported(
                f"The text of this conversation would have {n_bytes} bytes, but at most "
                f"{TEXT_BYTES_MAX} are shown."
            )

    def text(self, ids: Ids) -> str:
        """The text of token ids, control tokens as they are written, media as MEDIUM. Raises
        NotSupported if it is too long."""
        return self.spell(ids).decode("utf-8", "replace")

    def spell(self, ids: Ids) -> bytes:
        """The bytes of `text`, which need not end with a whole character. Raises NotSupported."""
        self.check_size(ids)
        parts: list[bytes] = []
        for id in ids.tolist():
            if 0 <= id < len(self.pieces):
                parts.append(self.pieces[id] or self.names[id])
            elif id < 0 and parts[-1:] != [MEDIUM.encode()]:
                parts.append(MEDIUM.encode())
        return b"".join(parts)


class SomePieces(Sequence[bytes]):
    """Pieces of a vocabulary of which only some are known; the others are empty."""

    def __init__(self, n_tokens: int, known: Mapping[int, bytes]) -> None:
        self.n_tokens, self.known = n_tokens, known

    def __len__(self) -> int:
        return self.n_tokens

    @overload
    def __getitem__(self, id: int) -> bytes: ...
    @overload
    def __getitem__(self, id: slice) -> Sequence[bytes]: ...
    def __getitem__(self, id: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(id, slice):
            return [self[each] for each in range(*id.indices(self.n_tokens))]
        if not 0 <= id < self.n_tokens:
            raise IndexError(id)
        return self.known.get(id, b"")


def some_words(n_tokens: int, known: Mapping[int, tuple[bytes, bytes]]) -> KeptVocabulary:
    """A vocabulary of which the piece and the name of some ids are known."""
    pieces, names = ({id: both[k] for id, both in known.items() if both[k]} for k in (0, 1))
    return KeptVocabulary(SomePieces(n_tokens, pieces), SomePieces(n_tokens, names))


@dataclass(frozen=True, slots=True)
class KnownWords:
    """A vocabulary, or what is known of it from conversations that were imported (`some_words`)."""

    vocabulary: KeptVocabulary
    hash: bytes
    """Of the whole vocabulary, 8 bytes (`codec.base.vocabulary_hash`)."""
    tokenizer: TokenizerIdentity
    """Without rules where these are not kept."""
    model: str = ""
    """The name of a model that has it, if it was never served here."""

    def some(self) -> dict[int, tuple[bytes, bytes]]:
        """The piece and the name of each id that is known, if not all are."""
        pieces, names = self.vocabulary.pieces, self.vocabulary.names
        if not isinstance(pieces, SomePieces) or not isinstance(names, SomePieces):
            return {}
        return {id: (pieces[id], names[id]) for id in {*pieces.known, *names.known}}

    def check(self, other: KnownWords) -> None:
        """InvalidRequest if the other, of which some is known, contradicts this one."""
        mine, theirs = self.vocabulary, other.vocabulary
        if self.hash == other.hash and len(mine.pieces) == len(theirs.pieces):
            pairs = (((mine.pieces[id], mine.names[id]), both) for id, both in other.some().items())
            if not any(known != both and any(known) for known, both in pairs):
                return
        raise InvalidRequest(
            "The words of this conversation are not those that its tokenizer has here."
        )


class _SomeWords(msgspec.Struct, array_like=True):
    """The content of a .words file."""

    n_tokens: int
    known: dict[int, tuple[bytes, bytes]]
    hash: bytes
    tokenizer: str
    rules: str | None
    model: str


class Vocabularies:
    """The kept vocabularies of a store, in a folder of their own."""

    def __init__(self, folder: Path, files: StoreFiles = PLAIN_FILES) -> None:
        self.folder = folder
        self._files = files

    def has(self, digest: bytes) -> bool:
        """Whether the whole vocabulary of a tokenizer identity is kept."""
        return self._path(digest).is_file()

    def digests(self, *suffixes: str) -> list[bytes]:
        """The tokenizers of which files with these suffixes are kept: `.vocab`, `.words` (of some
        tenant) or `.damaged`."""
        kept = (path for path in self.folder.glob("*") if path.suffix in suffixes)
        names = {path.name.partition(".")[0] for path in kept}
        return [bytes.fromhex(name) for name in sorted(names) if _DIGEST.fullmatch(name)]

    def keep(self, digest: bytes, vocabulary: KeptVocabulary) -> None:
        """Write a vocabulary durably, whole or not at all. Raises DiskFull or StoreError."""
        with self._alone():
            self._write(self._path(digest), [list(vocabulary.pieces), list(vocabulary.names)])
            for path in self.folder.glob(f"{digest.hex()}*.words"):
                path.unlink(missing_ok=True)

    def add_words(self, digest: bytes, scope: str, words: KnownWords) -> None:
        """Keep what some tokens of a tokenizer stand for in a tenant's conversations, beside what it
        knows of others. Raises InvalidRequest if the tokenizer has other words there, DiskFull or
        StoreError."""
        with self._alone():
            before = self._kept(digest, scope)
            if before is not None:
                before.check(words)
            if self.has(digest):
                return
            had = {} if before is None else before.some()
            known = had | words.some()
            if before is not None and known.keys() == had.keys():
                return
            of, n_tokens = words.tokenizer, len(words.vocabulary.pieces)
            content = _SomeWords(n_tokens, known, words.hash, of.pieces, of.rules, words.model)
            self._write(self._words_path(digest, scope), content)
            (self.folder / f"{digest.hex()}.words").unlink(missing_ok=True)  # of no tenant: of old

    def keep_words(self, digest: bytes, said: Mapping[str, Collection[int]]) -> None:
        """Keep, of a tokenizer that is known in part, what the tokens stand for that each tenant has:
        `said` has them by tenant; durable when it returns. Raises DiskFull or StoreError."""
        mine = {self._words_path(digest, tenant): ids for tenant, ids in said.items()}
        with self._alone(), durable.store_errors("a vocabulary cannot be kept"):
            for path in list(self.folder.glob(f"{digest.hex()}*.words")):
                self._keep_only(path, mine.get(path, ()))
            for path in list(self.folder.glob(f"{digest.hex()}*.damaged")):
                path.unlink(missing_ok=True)
            durable.sync_dir(self.folder)  # or a power cut brings back what no later gc looks for

    def _keep_only(self, path: Path, wanted: Collection[int]) -> None:
        try:
            some = self._load(path, _SomeWords)
        except StoreError:
            if path.exists():
                raise  # it may be sound, and cannot be read now
            return
        if some is None:
            return
        known = {id: both for id, both in some.known.items() if id in wanted}
        if not known:
            path.unlink(missing_ok=True)
        elif len(known) < len(some.known):
            self._write(path, msgspec.structs.replace(some, known=known))

    def words(self, digest: bytes, scope: str | None = None) -> KnownWords:
        """What is kept of a vocabulary, for the conversations of a tenant; None: the whole one.
        Raises StoreError if nothing is, or it is damaged; it is then set aside, and written anew
        when its model is served."""
        found = self._kept(digest, scope)
        if found is None:
            message = (
                "The vocabulary of this conversation is not kept here, because its model was last "
                "served by an earlier towerd: serve its model once."
            )
            raise StoreError(message, public=message)
        return found

    def read(self, digest: bytes, scope: str | None = None) -> KeptVocabulary:
        """A kept vocabulary. Raises as `words`."""
        return self.words(digest, scope).vocabulary

    def of_any(self, digest: bytes) -> list[KnownWords]:
        """All that is kept of a vocabulary and not damaged, whosever it is: for what it says of the
        tokenizer, and not to be shown."""
        found: list[KnownWords | None] = []
        with suppress(StoreError):
            found.append(self._whole(digest))
        for path in self.folder.glob(f"{digest.hex()}.*.words"):
            with suppress(StoreError):
                found.append(self._some(path))
        return [each for each in found if each is not None]

    def _kept(self, digest: bytes, scope: str | None) -> KnownWords | None:
        whole = self._whole(digest)
        if whole is not None or scope is None:
            return whole
        return self._some(self._words_path(digest, scope))

    def _whole(self, digest: bytes) -> KnownWords | None:
        whole = self._load(self._path(digest), tuple[list[bytes], list[bytes]])
        if whole is None:
            return None
        vocabulary = KeptVocabulary(*whole)
        both = zip(vocabulary.pieces, vocabulary.names, strict=True)
        of = TokenizerIdentity(tokenizer_hash(piece or name for piece, name in both))
        return KnownWords(vocabulary, vocabulary_hash(vocabulary), of)

    def _some(self, path: Path) -> KnownWords | None:
        some = self._load(path, _SomeWords)
        if some is None:
            return None
        of = TokenizerIdentity(some.tokenizer, some.rules)
        return KnownWords(some_words(some.n_tokens, some.known), some.hash, of, some.model)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Of all processes of this store. Raises DiskFull or StoreError."""
        with ExitStack() as stack:
            with durable.store_errors("a vocabulary cannot be kept"):
                durable.make_dir(self.folder)
                stack.enter_context(folder_locked(self.folder))
            yield

    def _write(self, path: Path, content: Any) -> None:
        packed = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(content))
        data = _HEAD.pack(MAGIC, VERSION, _checksum(path.name.encode() + packed)) + packed
        half = self.folder / f"{secrets.token_hex(8)}.tmp"
        with durable.store_errors("a vocabulary cannot be kept"):
            for left in self.folder.glob("*.tmp"):  # by a kill
                left.unlink(missing_ok=True)
            with self._files.create(half, path, len(data)) as file:
                file.write(memoryview(data), 0)

    def _load(self, path: Path, type: type[T]) -> T | None:
        """The content of a file; None if there is none. Raises StoreError, if it is damaged or cannot
        be read now; a damaged one is set aside."""
        with durable.store_errors("a kept vocabulary cannot be read"):
            try:
                data = bytes(self._files.read(path))
            except FileNotFoundError:
                return None
            except StateError:
                data = b""  # damaged, as what follows finds
        try:
            magic, version, expected = _HEAD.unpack_from(data)
            packed = data[_HEAD.size :]
            named = b"" if version == VERSION_NAMELESS else path.name.encode()
            if magic != MAGIC or version not in (VERSION, VERSION_NAMELESS):
                raise ValueError("version")
            if expected != _checksum(named + packed):
                raise ValueError("checksum")
            body = zstandard.ZstdDecompressor().decompress(packed, max_output_size=BYTES_MAX)
            return msgspec.msgpack.decode(body, type=type)
        except (ValueError, struct.error, zstandard.ZstdError, msgspec.MsgspecError) as error:
            with suppress(OSError):  # another reader has just done it
                path.replace(path.with_suffix(".damaged"))
            message = (
                "The kept vocabulary of this conversation is damaged and was set aside: serve its "
                "model once, which keeps it anew."
            )
            raise StoreError(message, public=message) from error

    def _path(self, digest: bytes) -> Path:
        return self.folder / f"{digest.hex()}.vocab"

    def _words_path(self, digest: bytes, scope: str) -> Path:
        tenant = hashlib.blake2b(tenant_of(scope).encode(), digest_size=_TENANT_BYTES)
        return self.folder / f"{digest.hex()}.{tenant.hexdigest()}.words"


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
