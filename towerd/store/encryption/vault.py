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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from towerd.errors import ConfigError, StoreError
from towerd.slots.errors import StateError
from towerd.store.encryption.key_source import KEY_BYTES, SALT_BYTES, KeySource
from towerd.store.files import durable
from towerd.system.folders import folder_locked

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


class _Unlocked(NamedTuple):
    """The keys, as `keys.json` has them at one time."""

    table: _KeyTable
    user_key: bytes
    keys: Mapping[int, bytes]


class Vault:
    """The keys of one store, unlocked. Its methods may run in any thread. `renewing` changes its keys;
    all processes that have them notice."""

    def __init__(self, root: Path, table: _KeyTable, user_key: bytes) -> None:
        """Use `Vault.open` or `Vault.create`. Raises ConfigError if it is another key."""
        self._root = root
        self._mark = _mark(root)
        self._now = _unlocked(table, user_key)
        self._changing = threading.RLock()
        self._derived: dict[tuple[int, str], bytes] = {}
        self._ciphers: dict[tuple[int, str], AESGCM] = {}

    @classmethod
    def create(cls, root: Path, source: KeySource, *, is_encrypting: bool) -> Vault:
        """New keys for the store in `root`, whose lock is held. is_encrypting: whether it has content. Raises
        ConfigError, OSError."""
        account, salt = secrets.token_hex(8), secrets.token_bytes(SALT_BYTES)
        user_key = source.new_key(account, salt)
        table = _KeyTable(VERSION, str(source), account, salt.hex(), [], is_encrypting)
        table = _with_keys(table, {1: secrets.token_bytes(KEY_BYTES)}, user_key)
        _write(root, table)
        return cls(root, table, user_key)

    @classmethod
    def open(cls, root: Path, source: KeySource | None = None) -> Vault:
        """The keys of the encrypted store in `root`, of which nothing is changed. source: where its key is now; None: where
        it was. Raises ConfigError if that is another key, StoreError if both files are damaged."""
        failure: ConfigError | None = None
        for table in _read(root):
            try:
                place = source or KeySource.parse(table.source)
                user_key = place.key(table.account, bytes.fromhex(table.salt))
                return cls(root, msgspec.structs.replace(table, source=str(place)), user_key)
            except ConfigError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def heal(self) -> None:
        """Write both files again if one is damaged, or of before a kill, or says that the key is elsewhere. For who has the
        store's lock, before any other process uses the store. Raises OSError."""
        tables = _read(self._root)
        if len(tables) < 2 or any(each.sum() != self._now.table.sum() for each in tables):
            self._keep(self._now)

    @property
    def is_encrypting(self) -> bool:
        """Whether some of the store is not encrypted yet."""
        return self._now.table.is_encrypting

    @property
    def source(self) -> str:
        """Where its key is: "keyring", "passphrase", or "file:PATH"."""
        return self._now.table.source

    @property
    def key_ids(self) -> Sequence[int]:
        """The numbers of its keys, the one in use first."""
        return sorted(self._noticed().keys, reverse=True)

    def key(self, purpose: str, key_id: int | None = None) -> bytes:
        """The 32 bytes for a purpose, of the key in use or the one of a number. Raises StateError."""
        keys = self._noticed().keys
        id = max(keys) if key_id is None else key_id
        if id not in keys:
            raise StateError("it was sealed with a key that was destroyed, or with another store's")
        return self._derive(purpose, id, keys[id])

    def key_in_use(self, purpose: str) -> tuple[int, bytes]:
        """Its number, and the 32 bytes for a purpose."""
        keys = self._noticed().keys
        id = max(keys)
        return id, self._derive(purpose, id, keys[id])

    def _derive(self, purpose: str, id: int, key: bytes) -> bytes:
        known = self._derived.get((id, purpose))
        if known is None:
            info = b"towerd store " + purpose.encode()
            known = self._derived[id, purpose] = HKDF(SHA256(), KEY_BYTES, None, info).derive(key)
        return known

    def seal(self, purpose: str, data: bytes | memoryview, about: bytes = b"") -> bytes:
        """A sealed record, `SEAL_BYTES` longer than the data. about: what it must be unsealed with"""
        id, key = self.key_in_use(purpose)
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = self._cipher(purpose, id, key).encrypt(nonce, data, about)
        return _PREFIX.pack(id, nonce) + sealed

    def unseal(self, purpose: str, sealed: bytes | memoryview, about: bytes = b"") -> bytes:
        """The data of a record. Raises StateError unless it is whole, of this store, purpose and `about`."""
        if len(sealed) < SEAL_BYTES:
            raise StateError("a sealed record is too short")
        id, nonce = _PREFIX.unpack_from(sealed)
        try:
            cipher = self._cipher(purpose, id, self.key(purpose, id))
            return cipher.decrypt(nonce, memoryview(sealed)[_PREFIX.size :], about)
        except InvalidTag:
            raise StateError("a sealed record is damaged") from None

    def _cipher(self, purpose: str, id: int, key: bytes) -> AESGCM:
        known = self._ciphers.get((id, purpose))
        if known is None:
            known = self._ciphers[id, purpose] = AESGCM(key)
        return known

    def finish_encrypting(self) -> None:
        """Note that all of the store is encrypted, for who has its lock. Raises OSError."""
        now = self._now
        table = msgspec.structs.replace(now.table, is_encrypting=False)
        self._keep(now._replace(table=table))

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """Seal with a new key from now on, and destroy all earlier ones when the block has ended without an error:
        nothing may need them then. One renewal at a time, of all processes: others wait. Killed or failed, all keys
        stay, and the next renewal destroys them. Raises OSError, or ConfigError."""
        with folder_locked(self._root):
            with self._changing:
                before = self._noticed()
                id = max(before.keys) + 1
                new = {**before.keys, id: secrets.token_bytes(KEY_BYTES)}
                self._keep(before._replace(keys=new))
            yield
            with self._changing:
                now = self._noticed()
                self._keep(now._replace(keys={id: now.keys[id]}))
                source = KeySource.parse(now.table.source)
                if source.kind == "keyring":
                    self.change_source(source)

    def change_source(self, source: KeySource) -> None:
        """Wrap the keys with a new key of `source` from now on, after which the earlier one opens nothing. For who has the
        store's lock, or renews. Raises ConfigError, OSError; the earlier one then stays."""
        with self._changing:
            before = self._noticed()
            old = KeySource.parse(before.table.source)
            account, salt = secrets.token_hex(8), secrets.token_bytes(SALT_BYTES)
            user_key = source.new_key(account, salt)
            if user_key == before.user_key:
                raise ConfigError(
                    f"{source} has the key that opens the store already: name another file."
                )
            says = {"source": str(source), "account": account, "salt": salt.hex()}
            table = msgspec.structs.replace(before.table, **says)
            self._keep(_Unlocked(table, user_key, before.keys))
            old.delete(before.table.account)

    def _keep(self, now: _Unlocked) -> None:
        """Write the keys. Raises OSError."""
        with self._changing:
            table = _with_keys(now.table, now.keys, now.user_key)
            _write(self._root, table)
            self._now, self._mark = now._replace(table=table), _mark(self._root)
            self._derived = {at: key for at, key in self._derived.items() if at[0] in now.keys}
            self._ciphers = {at: each for at, each in self._ciphers.items() if at[0] in now.keys}

    def _noticed(self) -> _Unlocked:
        """The keys, also if another process has changed them. If they cannot be read now, they are what they were."""
        if _mark(self._root) == self._mark:
            return self._now
        with self._changing, suppress(StoreError, ConfigError):
            mark, table = _mark(self._root), _read(self._root)[0]
            user_key, old = self._now.user_key, self._now.table
            if (table.source, table.account) != (old.source, old.account):
                source = KeySource.parse(table.source)
                user_key = source.key(table.account, bytes.fromhex(table.salt))
            self._now, self._mark = _unlocked(table, user_key), mark
        return self._now


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


def _unlocked(table: _KeyTable, user_key: bytes) -> _Unlocked:
    """Raises ConfigError if it is another key."""
    keys = {each.id: _unwrapped(each, user_key, table) for each in table.keys}
    return _Unlocked(table, user_key, keys)


def _about(table: _KeyTable, id: int) -> bytes:
    facts = table.version, table.account, table.salt, table.is_encrypting, id
    return " ".join(map(str, ("towerd", *facts))).encode()


def _with_keys(table: _KeyTable, keys: Mapping[int, bytes], user_key: bytes) -> _KeyTable:
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
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            continue
        if table.checksum != table.sum():
            continue
        if table.version != VERSION:
            raise StoreError(f"{root / name} is of a newer towerd: use that one.")
        if table.keys:
            found.append(table)
    if not found:
        raise StoreError(
            f"{root / FILE_NAME} and {COPY_NAME} are damaged, or cannot be read: put copies of a backup in their place."
        )
    return sorted(found, key=lambda each: max(key.id for key in each.keys), reverse=True)


def _write(root: Path, table: _KeyTable) -> None:
    """Both files, one after the other; what they had is overwritten once it is replaced."""
    table = msgspec.structs.replace(table, checksum=table.sum())
    data = msgspec.json.format(msgspec.json.encode(table)) + b"\n"
    for path in (root / FILE_NAME, root / COPY_NAME):
        half = path.with_suffix(path.suffix + ".half")
        durable.erase(half)
        try:
            before = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            before = -1
        try:
            with durable.new_file(half, path) as fd:
                durable.write_all(fd, memoryview(data), 0)
            if before >= 0 and not os.fstat(before).st_nlink:  # else it is a backup's, too
                durable.overwrite(before)
        finally:
            if before >= 0:
                os.close(before)
