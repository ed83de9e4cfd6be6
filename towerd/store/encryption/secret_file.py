"""A file with one secret, in hex: sealed with the store's keys if the store is encrypted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from towerd.slots.errors import StateError
from towerd.store.files import durable

if TYPE_CHECKING:
    from towerd.store.encryption.vault import Vault

SHARED_KEY = "shared.key"
"""The file in a store with the key of its shared tier."""
_SEALED = "sealed "


def secret_text(secret: bytes, vault: Vault | None) -> bytes:
    """What a file says that holds a secret."""
    sealed = None if vault is None else vault.seal("secret", secret)
    return (secret.hex() if sealed is None else _SEALED + sealed.hex()).encode() + b"\n"


def read_secret(path: Path, vault: Vault | None) -> bytes:
    """The secret of a file. Raises OSError, ValueError (no hex digits), or StateError (sealed with keys that are
    not there)."""
    text = path.read_text(encoding="ascii").strip()
    if not text.startswith(_SEALED):
        return bytes.fromhex(text)
    if vault is None:
        raise StateError("it is of an encrypted store, and opens nothing elsewhere")
    return vault.unseal("secret", bytes.fromhex(text.removeprefix(_SEALED)))


def seal_secret(path: Path, vault: Vault) -> None:
    """Seal the secret of a file with the key in use, and overwrite what the file had. Raises as `read_secret`."""
    secret = read_secret(path, vault)
    half = path.with_name(f"{path.name}.{os.getpid()}.half")
    half.unlink(missing_ok=True)
    old = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with durable.new_file(half, path) as fd:
            durable.write_all(fd, memoryview(secret_text(secret, vault)), 0)
        durable.overwrite(old)
    finally:
        os.close(old)
