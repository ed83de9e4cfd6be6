"""Opening a store's directory: its lock, and its keys if it is encrypted or is to be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from towerd.errors import ConfigError
from towerd.store.files import durable
from towerd.store.files.directory import Directory, StoreLock

if TYPE_CHECKING:
    from towerd.store.encryption.vault import Vault

KEY_FILES = ("keys.json", "keys.copy")
"""Their presence says that a store is encrypted."""
_SEALED_FRAME = b"\xf3TWJ\0\x01"
"""How a record of the journal begins that is sealed, but for its fifth byte."""
_CONTENT = ("catalog.sqlite", "journal", "segments", "media")


def ask_passphrase(root: Path, encrypt: str | None) -> None:
    """Ask for the passphrase of a store that has one, while the terminal is still free; it is then known to this process
    and those that it starts. Raises ConfigError."""
    is_new = not is_encrypted(root)
    if is_new and encrypt != "passphrase":
        return
    try:
        from towerd.store.encryption import key_source
        from towerd.store.encryption.vault import source_of
    except ImportError:
        return  # which opening the store says
    if is_new or (encrypt or source_of(root)) == "passphrase":
        key_source.passphrase(is_new=is_new)


class OpenedDirectory(NamedTuple):
    """A store's directory, and its keys if it is encrypted."""

    directory: Directory
    vault: Vault | None


def own_directory(
    root: Path, clock: Callable[[], float], encrypt: str | None, undo: ExitStack
) -> OpenedDirectory:
    """Lock the store in `root`, which is made if it is missing, and open its directory; `undo` releases both.
    encrypt: the source of the key (`KeySource`) of a store that is encrypted or is to be.

    Raises StoreLocked, StoreError, DiskFull, or ConfigError (no key, or another one)."""
    with durable.store_errors(f"the store directory {root} cannot be used"):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = StoreLock(root / "lock")
    undo.callback(lock.release)
    vault = opened_vault(root, encrypt)
    if vault is not None:
        with durable.store_errors(f"the keys of the store {root} cannot be written"):
            vault.heal()
    elif encrypt:
        vault = _created(root, encrypt)
    return _directory(root, clock, vault, undo)


def shared_directory(root: Path, clock: Callable[[], float], undo: ExitStack) -> OpenedDirectory:
    """The directory of a store whose lock another process of towerd has. Raises as `own_directory`."""
    vault = opened_vault(root, None)
    return _directory(root, clock, vault, undo)


def opened_vault(root: Path, encrypt: str | None) -> Vault | None:
    """The keys of the store in `root`, None if it is not encrypted. encrypt: as above. Raises ConfigError, StoreError."""
    return _opened(root, encrypt) if is_encrypted(root) else None


def is_encrypted(root: Path) -> bool:
    """Whether a store has keys."""
    return any((root / name).exists() for name in KEY_FILES)


def _directory(
    root: Path, clock: Callable[[], float], vault: Vault | None, undo: ExitStack
) -> OpenedDirectory:
    if vault is None:
        directory = Directory(root, clock)
    else:
        from towerd.store.encryption.sealed_files import SealedFiles

        directory = Directory(root, clock, SealedFiles(vault))
    undo.callback(directory.writes.close)
    return OpenedDirectory(directory, vault)


def _opened(root: Path, encrypt: str | None) -> Vault:
    try:
        from towerd.store.encryption.key_source import KeySource
        from towerd.store.encryption.vault import Vault
    except ImportError as error:
        raise ConfigError(
            f"The store {root} is encrypted, which needs packages: pip install 'towerd[encrypt]'."
        ) from error
    return Vault.open(root, KeySource.parse(encrypt) if encrypt else None)


def _created(root: Path, encrypt: str) -> Vault:
    try:
        from towerd.store.encryption.key_source import KeySource
        from towerd.store.encryption.vault import Vault
    except ImportError as error:
        raise ConfigError("--encrypt needs packages: pip install 'towerd[encrypt]'.") from error
    if _has_sealed(root):
        raise ConfigError(
            f"The store {root} is encrypted already, and its keys are missing: put a copy of {KEY_FILES[0]} back."
        )
    has_content = any((root / name).exists() for name in _CONTENT)
    with durable.store_errors(f"the keys of the store {root} cannot be written"):
        return Vault.create(root, KeySource.parse(encrypt), is_encrypting=has_content)


def _has_sealed(root: Path) -> bool:
    """Whether any file was sealed with keys that are not there."""
    from towerd.store.encryption.sealed_files import is_sealed

    for folder in ("segments", "boundaries", "tokenizers", "media"):
        with suppress(OSError):
            if any(is_sealed(path) for path in (root / folder).iterdir()):
                return True
    with suppress(OSError):
        for path in (root / "journal").iterdir():
            with path.open("rb") as file:
                head = file.read(len(_SEALED_FRAME))
            if head[:4] + head[5:6] == _SEALED_FRAME[:4] + _SEALED_FRAME[5:6]:
                return True
    return False
