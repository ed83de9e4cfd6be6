"""KeySource: where the key comes from that opens an encrypted store: the system's keyring, a file, or a passphrase."""

from __future__ import annotations

import getpass
import hashlib
import logging
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towerd.errors import ConfigError
from towerd.store.files import durable

log = logging.getLogger(__name__)

KEY_BYTES = 32
SALT_BYTES = 16
SOURCES = "keyring, passphrase, or file:PATH"
PASSPHRASE_VARIABLE = "TOWERD_PASSPHRASE"
NEW_PASSPHRASE_VARIABLE = "TOWERD_NEW_PASSPHRASE"
FILE_PASSPHRASE_VARIABLE = "TOWERD_FILE_PASSPHRASE"
_SERVICE = "towerd"
_CREDENTIAL = "towerd-passphrase"
"""The name of a credential of a systemd unit."""
_SCRYPT_N, _SCRYPT_R = 1 << 16, 8
"""64 MiB and a fifth of a second for each guess."""


@dataclass(frozen=True, slots=True)
class KeySource:
    """kind: "keyring", "passphrase" or "file". path: the file, absolute"""

    kind: str
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> KeySource:
        """The source that a setting or a key table names. Raises ConfigError."""
        kind, _, path = text.partition(":")
        if kind == "file" and path:
            return cls(kind, Path(path).expanduser().absolute())
        if text in ("keyring", "passphrase"):
            return cls(text)
        raise ConfigError(f"--encrypt {text} names no source of a key: give {SOURCES}.")

    def __str__(self) -> str:
        return self.kind if self.path is None else f"{self.kind}:{self.path}"

    def new_key(self, account: str, salt: bytes) -> bytes:
        """The key for a new store, 32 bytes; the keyring and a file that is missing get a random one.

        account: names the store in the keyring; salt: stretches a passphrase. Raises ConfigError."""
        if self.kind == "keyring":
            key = secrets.token_bytes(KEY_BYTES)
            _keyring_set(account, key)
            return key
        if self.path is not None and not self.path.exists():
            _write_key(self.path)
        if self.kind == "passphrase":
            return stretched(passphrase(is_new=True), salt)
        return self.key(account, salt)

    def key(self, account: str, salt: bytes) -> bytes:
        """The key of a store that exists, as `new_key` made it. Raises ConfigError."""
        if self.kind == "keyring":
            return _keyring_get(account)
        if self.path is not None:
            return _read_key(self.path)
        return stretched(passphrase(), salt)

    def delete(self, account: str) -> None:
        """Have the keyring forget a key; other sources keep theirs."""
        if self.kind == "keyring":
            _keyring_delete(account)


def passphrase(*, is_new: bool = False) -> bytes:
    """The store's, from the environment, a credential of the unit, or the terminal; a new one is asked for twice. Raises
    ConfigError."""
    for name in (NEW_PASSPHRASE_VARIABLE, PASSPHRASE_VARIABLE)[0 if is_new else 1 :]:
        if said := os.environ.get(name):
            return said.encode()
    if folder := os.environ.get("CREDENTIALS_DIRECTORY"):
        path = Path(folder) / _CREDENTIAL
        if path.exists():
            return path.read_bytes().rstrip(b"\r\n")
    typed = _typed("Passphrase of the store: ", is_new, PASSPHRASE_VARIABLE)
    # so that a prompt is answered once, and processes that this one starts need none
    os.environ[PASSPHRASE_VARIABLE] = typed
    return typed.encode()


def file_passphrase(name: str, *, is_new: bool = False) -> bytes:
    """That of a file, from the environment or the terminal; a new one is asked for twice. Raises ConfigError."""
    if said := os.environ.get(FILE_PASSPHRASE_VARIABLE):
        return said.encode()
    return _typed(f"Passphrase of {name}: ", is_new, FILE_PASSPHRASE_VARIABLE).encode()


def _typed(prompt: str, is_new: bool, variable: str) -> str:
    typed = ""
    if sys.stdin is not None and sys.stdin.isatty():
        typed = getpass.getpass(prompt)
        if typed and is_new and getpass.getpass("Once more: ") != typed:
            raise ConfigError("The two passphrases differ: try again.")
    if not typed:
        raise ConfigError(f"A passphrase is needed: set {variable}, or run this in a terminal.")
    return typed


def stretched(secret: bytes, salt: bytes) -> bytes:
    """A key of `KEY_BYTES` from a passphrase (scrypt, RFC 7914)."""
    n, r = _SCRYPT_N, _SCRYPT_R
    most = 2 * 128 * n * r
    return hashlib.scrypt(secret, salt=salt, n=n, r=r, p=1, maxmem=most, dklen=KEY_BYTES)


def _write_key(path: Path) -> None:
    half = path.with_name(path.name + ".half")
    data = secrets.token_hex(KEY_BYTES).encode() + b"\n"
    try:
        half.unlink(missing_ok=True)
        with durable.new_file(half, path) as fd:
            durable.write_all(fd, memoryview(data), 0)
    except OSError as error:
        raise ConfigError(
            f"The key file {path} cannot be made: {error.strerror or error}."
        ) from error


def _read_key(path: Path) -> bytes:
    try:
        if path.stat().st_mode & 0o077:
            said = {"file": str(path)}
            log.warning("other users can read the key of the store: chmod 600", extra=said)
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except OSError as error:
        raise ConfigError(
            f"The key file {path} cannot be read: {error.strerror or error}."
        ) from error
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"The key file {path} does not hold a key, {2 * KEY_BYTES} hex digits: put a copy in its place."
        )
    return key


def _keyring() -> tuple[Any, type[Exception]]:
    """The module, and what it raises."""
    try:
        import keyring
        from keyring.errors import KeyringError
    except ImportError:
        raise ConfigError(
            "The system's keyring needs a package: pip install 'towerd[encrypt]', or give --encrypt file:PATH."
        ) from None
    return keyring, KeyringError


def _no_keyring(error: Exception, way_out: str) -> ConfigError:
    return ConfigError(f"The system's keyring cannot be used ({error}): {way_out}.")


def _keyring_get(account: str) -> bytes:
    keyring, errors = _keyring()
    try:
        found = keyring.get_password(_SERVICE, account)
    except errors as error:
        raise _no_keyring(error, "unlock or start it") from error
    try:
        key = bytes.fromhex(found or "")
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"The system's keyring has no key for this store ({_SERVICE}, {account}): unlock it, or restore it."
        )
    return key


def _keyring_set(account: str, key: bytes) -> None:
    keyring, errors = _keyring()
    try:
        keyring.set_password(_SERVICE, account, key.hex())
    except errors as error:
        raise _no_keyring(error, "give --encrypt passphrase or file:PATH") from error


def _keyring_delete(account: str) -> None:
    keyring, errors = _keyring()
    try:
        keyring.delete_password(_SERVICE, account)
    except errors as error:
        raise _no_keyring(error, "unlock or start it") from error
