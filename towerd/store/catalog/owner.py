"""Owning a store: the one process that has its lock has its catalog."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from towerd.store.catalog.sqlite import SqliteCatalog
from towerd.store.encryption.opening import own_directory
from towerd.store.files.directory import Directory

if TYPE_CHECKING:
    from towerd.store.encryption.vault import Vault


class OwnedStore(NamedTuple):
    """What its owner has of a store."""

    directory: Directory
    vault: Vault | None
    """The keys of an encrypted one."""
    catalog: SqliteCatalog


def own_store(
    root: Path, clock: Callable[[], float], encrypt: str | None, undo: ExitStack
) -> OwnedStore:
    """Lock the store in `root`, which is made if it is missing, encrypt what is not yet if it is to be, and open
    its catalog; `undo` closes all. encrypt: the source of the key (`KeySource`) of a store that is encrypted or is
    to be.

    Raises StoreLocked, StoreVersion, StoreError, DiskFull, OSError, or ConfigError (no key, or another one)."""
    directory, vault = own_directory(root, clock, encrypt, undo)
    if vault is not None and vault.is_encrypting:
        from towerd.store.catalog.encrypting import encrypt_store

        encrypt_store(directory, vault)
    catalog = SqliteCatalog(directory.catalog, directory.writes, vault)
    undo.callback(catalog.close)
    directory.sweep_tmp()
    return OwnedStore(directory, vault, catalog)
