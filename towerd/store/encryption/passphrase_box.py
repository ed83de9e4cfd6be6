"""Data sealed with a passphrase, for files that leave a machine.

magic 7 | salt 16 | nonce 12 | AES-256-GCM of the data, its tag last; its key: scrypt of the passphrase and salt
"""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from towerd.errors import ConfigError
from towerd.store.encryption.key_source import SALT_BYTES, file_passphrase, stretched
from towerd.store.encryption.vault import NONCE_BYTES, TAG_BYTES

MAGIC = b"TOWERX\x01"
_AT = len(MAGIC) + SALT_BYTES
_LEAST = _AT + NONCE_BYTES + TAG_BYTES


def boxed(data: bytes, name: str) -> bytes:
    """The data, sealed with a passphrase that is asked for. name: the file's. Raises ConfigError without one."""
    salt, nonce = secrets.token_bytes(SALT_BYTES), secrets.token_bytes(NONCE_BYTES)
    key = stretched(file_passphrase(name, is_new=True), salt)
    return MAGIC + salt + nonce + AESGCM(key).encrypt(nonce, data, MAGIC)


def unboxed(data: bytes, name: str) -> bytes:
    """The inverse of `boxed`. Raises ConfigError without a passphrase, with another one, or if the file is damaged."""
    key = stretched(file_passphrase(name), data[len(MAGIC) : _AT])
    try:
        if len(data) < _LEAST:
            raise InvalidTag
        nonce = data[_AT : _AT + NONCE_BYTES]
        return AESGCM(key).decrypt(nonce, data[_AT + NONCE_BYTES :], MAGIC)
    except InvalidTag:
        raise ConfigError("The passphrase is not the file's, or the file is damaged.") from None
