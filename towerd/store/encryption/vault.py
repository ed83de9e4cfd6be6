"""Vault: the keys of an encrypted store.

`keys.json` in the store has random keys, wrapped (AES-256-GCM) with the one that a KeySource has. `keys.copy` has
the same once more, so that a damaged file loses nothing. The last key is in use; earlier ones are there only while
what they sealed is sealed anew, after which nothing can be read that was deleted before (`towerctl forget`). Each
purpose has a key of its own (HKDF-SHA-256).

What a sealed record is: u32 number of the key | nonce 12 | AES-256-GCM of the data, its tag last.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from towerd.errors import ConfigError, StoreError
from towerd.slots.errors import StateError
from towerd.store.encryption.key_source import KEY_BYTES, SALT_BYTES, KeySource
from towerd.store.files import durable
from towerd.store.files.durable import overwrite

FILE_NAME = "keys.json"
COPY_NAME = "keys.copy"
VERSION = 1
NONCE_BYTES = 12
TAG_BYTES = 16
_PREFIX = struct.Struct("<I12s")
SEAL_BYTES = _PREFIX.size + TAG_BYTES
"""Bytes that a sealed record has beyond its data."""


class _WrappedKey(msgspec.Struct, frozen=True):
    id: int
    nonce: str
    wrapped: str
    """Hex digits."""


class _KeyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `keys.json` says."""

    version: int
    source: str
    account: str
    """The store's name in the keyring."""
    salt: str
    keys: list[_WrappedKey]
    is_encrypting: bool = False
    """Some of the store is not encrypted yet."""
    checksum: str = ""
    """Of the rest (BLAKE2b-128)."""

    def sum(self) -> str:
        """What `checksum` should be."""
        rest = msgspec.json.encode(msgspec.structs.replace(self, checksum=""))
        return blake2b(rest, digest_size=16).hexdigest()


class Vault:
    """The keys of one store, unlocked. Its methods may run in any thread; one at a time may change keys, in whatever
    process: the others notice."""

    def __init__(self, root: Path, table: _KeyTable, user_key: bytes) -> None:
        """Use `Vault.open` or `Vault.create`. Raises ConfigError if it is another key."""
        self._root = root
        self._table = table
        self._user_key = user_key
        self._keys = {each.id: _unwrapped(each, user_key, table) for each in table.keys}
        self._mark = _mark(root)
        self._noticing = threading.Lock()
        self._derived: dict[tuple[int, str], bytes] = {}
        self._ciphers: dict[tuple[int, str], AESGCM] = {}

    @classmethod
    def create(cls, root: Path, source: KeySource, *, is_encrypting: bool) -> Vault:
        """New keys for the store in `root`. is_encrypting: whether it has content. Raises ConfigError, OSError."""
        account, salt = secrets.token_hex(8), secrets.token_bytes(SALT_BYTES)
        user_key = source.new_key(account, salt)
        table = _KeyTable(VERSION, str(source), account, salt.hex(), [], is_encrypting)
        table = _with_keys(table, {1: secrets.token_bytes(KEY_BYTES)}, user_key)
        _write(root, table)
        return cls(root, table, user_key)

    @classmethod
    def open(cls, root: Path, source: KeySource | None = None) -> Vault:
        """The keys of the encrypted store in `root`. source: where its key is now; None: where it was. Raises
        ConfigError if that is another key, StoreError if both files are damaged."""
        tables = _read(root)
        failure: ConfigError | None = None
        for table in tables:
            try:
                place = source or KeySource.parse(table.source)
                user_key = place.key(table.account, bytes.fromhex(table.salt))
                vault = cls(root, msgspec.structs.replace(table, source=str(place)), user_key)
            except ConfigError as error:
                failure = failure or error
                continue
            if len(tables) < 2 or tables[0] != tables[1] or table.source != str(place):
                vault._keep(vault._table)  # the other is damaged, or of before a kill
            return vault
        assert failure is not None
        raise failure

    @property
    def is_encrypting(self) -> bool:
        """Whether some of the store is not encrypted yet."""
        return self._table.is_encrypting

    @property
    def source(self) -> str:
        """Where its key is: "keyring", "passphrase", or "file:PATH"."""
        return self._table.source

    @property
    def key_ids(self) -> Sequence[int]:
        """The numbers of its keys, the one in use first."""
        if _mark(self._root) != self._mark:
            self._notice()
        return sorted(self._keys, reverse=True)

    def key(self, purpose: str, key_id: int | None = None) -> bytes:
        """The 32 bytes for a purpose, of the key in use or the one of a number. Raises StateError."""
        id = self.key_ids[0] if key_id is None else key_id
        known = self._derived.get((id, purpose))
        if known is None:
            if id not in self.key_ids or id not in self._keys:
                raise StateError(
                    "it was sealed with a key that was destroyed, or with another store's"
                )
            info = b"towerd store " + purpose.encode()
            known = HKDF(SHA256(), KEY_BYTES, None, info).derive(self._keys[id])
            self._derived[id, purpose] = known
        return known

    def seal(self, purpose: str, data: bytes | memoryview, about: bytes = b"") -> bytes:
        """A sealed record, `SEAL_BYTES` longer than the data. about: what it must be unsealed with"""
        id, nonce = self.key_ids[0], secrets.token_bytes(NONCE_BYTES)
        sealed = self._cipher(purpose, id).encrypt(nonce, data, about)
        return _PREFIX.pack(id, nonce) + sealed

    def unseal(self, purpose: str, sealed: bytes | memoryview, about: bytes = b"") -> bytes:
        """The data of a record. Raises StateError unless it is whole, of this store, purpose and `about`."""
        if len(sealed) < SEAL_BYTES:
            raise StateError("a sealed record is too short")
        id, nonce = _PREFIX.unpack_from(sealed)
        try:
            return self._cipher(purpose, id).decrypt(
                nonce, memoryview(sealed)[_PREFIX.size :], about
            )
        except InvalidTag:
            raise StateError("a sealed record is damaged") from None

    def _cipher(self, purpose: str, id: int) -> AESGCM:
        """Raises StateError."""
        known = self._ciphers.get((id, purpose))
        if known is None:
            known = self._ciphers[id, purpose] = AESGCM(self.key(purpose, id))
        return known

    def finish_encrypting(self) -> None:
        """Note that all of the store is encrypted. Raises OSError."""
        self._keep(msgspec.structs.replace(self._table, is_encrypting=False))

    def begin_renewal(self) -> None:
        """Seal with a new key from now on. Raises OSError; the keys then stay."""
        new = {**self._keys, self.key_ids[0] + 1: secrets.token_bytes(KEY_BYTES)}
        self._keep(_with_keys(self._table, new, self._user_key))
        self._keys = new

    def end_renewal(self) -> None:
        """Destroy all keys but the one in use, and the keyring's key that had wrapped them. Raises OSError,
        ConfigError; the earlier keys then stay."""
        last = self.key_ids[0]
        kept = {last: self._keys[last]}
        self._keep(_with_keys(self._table, kept, self._user_key))
        self._keys = kept
        self._derived = {each: key for each, key in self._derived.items() if each[0] == last}
        self._ciphers = {each: cipher for each, cipher in self._ciphers.items() if each[0] == last}
        source = KeySource.parse(self._table.source)
        if source.kind == "keyring":
            self.change_source(source)

    def change_source(self, source: KeySource) -> None:
        """Wrap the keys with a new key of `source` from now on, after which the earlier one opens nothing. Raises
        ConfigError, OSError; the earlier one then stays."""
        before = self._table
        account, salt = secrets.token_hex(8), secrets.token_bytes(SALT_BYTES)
        user_key = source.new_key(account, salt)
        table = msgspec.structs.replace(
            before, source=str(source), account=account, salt=salt.hex()
        )
        self._keep(_with_keys(table, self._keys, user_key))
        self._user_key = user_key
        KeySource.parse(before.source).delete(before.account)

    def _keep(self, table: _KeyTable) -> None:
        with self._noticing:
            _write(self._root, table)
            self._table, self._mark = table, _mark(self._root)

    def _notice(self) -> None:
        """Read what another process has written. If that cannot be read now, the keys stay as they are."""
        with self._noticing, suppress(StoreError, ConfigError, OSError):
            mark, table = _mark(self._root), _read(self._root)[0]
            user_key = self._user_key
            if (table.source, table.account) != (self._table.source, self._table.account):
                source = KeySource.parse(table.source)
                user_key = source.key(table.account, bytes.fromhex(table.salt))
            self._keys = {each.id: _unwrapped(each, user_key, table) for each in table.keys}
            self._table, self._user_key, self._mark = table, user_key, mark


def source_of(root: Path) -> str:
    """Where the key of an encrypted store is, as `KeySource` reads it. Raises StoreError."""
    return _read(root)[0].source


def _mark(root: Path) -> tuple[int, int]:
    """What is another one once `keys.json` was written again."""
    try:
        found = os.stat(root / FILE_NAME)
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _about(table: _KeyTable, id: int) -> bytes:
    return f"towerd {table.version} {table.account} {table.salt} {id}".encode()


def _with_keys(table: _KeyTable, keys: dict[int, bytes], user_key: bytes) -> _KeyTable:
    wrapped = []
    for id, key in keys.items():
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = AESGCM(user_key).encrypt(nonce, key, _about(table, id))
        wrapped.append(_WrappedKey(id, nonce.hex(), sealed.hex()))
    return msgspec.structs.replace(table, keys=wrapped)


def _unwrapped(each: _WrappedKey, user_key: bytes, table: _KeyTable) -> bytes:
    try:
        nonce, sealed = bytes.fromhex(each.nonce), bytes.fromhex(each.wrapped)
        return AESGCM(user_key).decrypt(nonce, sealed, _about(table, each.id))
    except (InvalidTag, ValueError):
        what = "passphrase" if table.source == "passphrase" else f"key of {table.source}"
        raise ConfigError(
            f"The {what} does not open this store: it was encrypted with another one."
        ) from None


def _read(root: Path) -> list[_KeyTable]:
    found = []
    for name in (FILE_NAME, COPY_NAME):
        try:
            table = msgspec.json.decode((root / name).read_bytes(), type=_KeyTable)
        except (FileNotFoundError, msgspec.DecodeError, ValueError):
            continue
        if table.checksum != table.sum():
            continue
        if table.version != VERSION:
            raise StoreError(f"{root / name} is of a newer towerd: use that one.")
        if table.keys:
            found.append(table)
    if not found:
        raise StoreError(
            f"{root / FILE_NAME} and {COPY_NAME} are damaged: put copies of a backup in their place."
        )
    return sorted(found, key=lambda each: max(key.id for key in each.keys), reverse=True)


def _write(root: Path, table: _KeyTable) -> None:
    """Both files, one after the other; what they had is overwritten once it is replaced."""
    table = msgspec.structs.replace(table, checksum=table.sum())
    data = msgspec.json.format(msgspec.json.encode(table)) + b"\n"
    for path in (root / FILE_NAME, root / COPY_NAME):
        half = path.with_suffix(path.suffix + ".half")
        half.unlink(missing_ok=True)
        try:
            before = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            before = -1
        try:
            with durable.new_file(half, path) as fd:
                durable.write_all(fd, memoryview(data), 0)
            if before >= 0:
                overwrite(before)
        finally:
            if before >= 0:
                os.close(before)
