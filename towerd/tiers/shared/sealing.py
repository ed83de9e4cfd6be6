"""Keys of tenants, and the sealing of objects with them.

A key file holds 32 random bytes in hex. From it each tenant gets two keys (HKDF-SHA-256): one names its
objects, one seals them. Whoever owns the bucket sees how many objects there are, how large they are and
when they came, and neither what they hold nor whether two tenants have the same text.

    magic 5 | salt 32 | AES-256-GCM of the data, its tag last

Each object has a key of its own, derived from the tenant's and the salt, so that no nonce is ever used
twice. The object's place in the bucket is authenticated with it: an object that was moved is refused.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from towerd.errors import ConfigError
from towerd.slots.errors import StateError
from towerd.store.encryption.secret_file import SHARED_KEY, read_secret, secret_text
from towerd.store.files import durable

if TYPE_CHECKING:
    from towerd.store.encryption.vault import Vault

log = logging.getLogger(__name__)

KEY_BYTES = 32
FILE_NAME = SHARED_KEY
MAGIC = b"TWRX\x01"
_SALT_BYTES = 32
_TAG_BYTES = 16
SEAL_BYTES = len(MAGIC) + _SALT_BYTES + _TAG_BYTES
"""Bytes that an object has beyond its data."""
_NONCE = bytes(12)
"""Every key seals one object."""


@dataclass(frozen=True, slots=True, repr=False)
class TenantKeys:
    """What a tenant names and seals its objects with."""

    naming: bytes
    sealing: bytes

    @classmethod
    def of(cls, master: bytes, tenant: str) -> TenantKeys:
        """Those of a tenant. master: what the key file holds"""
        name = tenant.encode()
        return cls(_derived(master, b"names", name), _derived(master, b"seals", name))

    @classmethod
    def of_collector(cls, master: bytes) -> TenantKeys:
        """Those of no tenant: what every daemon of the key file reads, whosever it is."""
        return cls(
            _derived(master, b"collector names", b""), _derived(master, b"collector seals", b"")
        )

    def name(self, kind: str, *parts: bytes) -> str:
        """A name that tells nothing to who has not the key, 64 hex digits: the same one for the same
        kind and parts."""
        h = hashlib.blake2b(key=self.naming, digest_size=32)
        for part in (kind.encode(), *parts):
            h.update(len(part).to_bytes(8, "little") + part)
        return h.hexdigest()

    def seal(self, place: str, data: bytes) -> bytes:
        """The bytes of the object at `place`."""
        salt = secrets.token_bytes(_SALT_BYTES)
        return MAGIC + salt + self._cipher(salt).encrypt(_NONCE, data, place.encode())

    def unseal(self, place: str, sealed: bytes | memoryview) -> bytes:
        """The inverse. Raises StateError unless the object is whole, of this tenant, and of this place."""
        if len(sealed) < SEAL_BYTES or sealed[: len(MAGIC)] != MAGIC:
            raise StateError("it is no object of towerd's, or one of another version")
        at = len(MAGIC) + _SALT_BYTES
        try:
            cipher = self._cipher(bytes(sealed[len(MAGIC) : at]))
            return cipher.decrypt(_NONCE, memoryview(sealed)[at:], place.encode())
        except InvalidTag:
            raise StateError("it is damaged, or was sealed with another key") from None

    def _cipher(self, salt: bytes) -> AESGCM:
        return AESGCM(_derived(self.sealing, salt, b"object"))


def _derived(key: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt, b"towerd shared " + info).derive(key)


def master_key(path: Path | None, store_dir: Path, vault: Vault | None = None) -> bytes:
    """The content of the key file, 32 bytes. path: None for `shared.key` in the store, which is made,
    for its owner alone, if it is missing, and is sealed if the store is encrypted (`vault`). Raises ConfigError."""
    own = store_dir / FILE_NAME
    try:
        if path is None and not own.exists():
            _make(own, vault)
        if (path or own).stat().st_mode & 0o077:
            said = {"file": str(path or own)}
            log.warning("other users can read the key of the shared tier: chmod 600", extra=said)
        key = read_secret(path or own, vault)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"The key file {path or own} cannot be read: {why}.") from error
    except StateError as error:
        raise ConfigError(f"The key file {path or own} cannot be read: {error}.") from error
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"The key file {path or own} does not hold a key, {2 * KEY_BYTES} hex digits: copy "
            f"{FILE_NAME} from the store of the other machine."
        )
    return key


def _make(path: Path, vault: Vault | None) -> None:
    """Several processes of a store may come here at once: the first file stays."""
    half, whole = (path.with_name(f"{path.name}.{os.getpid()}.{end}") for end in ("half", "whole"))
    for each in (half, whole):
        each.unlink(missing_ok=True)
    with durable.new_file(half, whole) as fd:
        key = secrets.token_bytes(KEY_BYTES)
        durable.write_all(fd, memoryview(secret_text(key, vault)), 0)
    try:
        with suppress(FileExistsError):
            os.link(whole, path)
            said = {"file": str(path)}
            log.warning(
                "a new key for the shared tier was made: other machines need it", extra=said
            )
    finally:
        whole.unlink()
    durable.sync_dir(path.parent)
