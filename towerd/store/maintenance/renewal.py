"""Renewing the keys of an encrypted store, so that what was deleted from it cannot be read any more.

Deleting a file, or a row of a database, leaves its blocks on the disk until something else is written there, and an
SSD may keep them for long. All of a store is sealed with its keys, so what these blocks hold is gone once the keys are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from towerd.slots.errors import StateError
from towerd.store.encryption.sealed_files import SealedFiles, sealed_paths
from towerd.store.encryption.secret_file import SHARED_KEY, seal_secret
from towerd.store.encryption.vault import Vault
from towerd.store.files import durable
from towerd.store.state.state import StoreState


@contextmanager
def keys_renewed(state: StoreState, vault: Vault) -> Iterator[None]:
    """Seal all of a store with a new key, and destroy the earlier ones when the block has ended without an error:
    it has to renew what else the store's owner has sealed. Killed or failed, all keys stay, and the next renewal
    destroys them. One at a time: others wait. Raises DiskFull or StoreError."""
    with durable.store_errors("the keys of the store cannot be renewed"), vault.renewing():
        state.catalog.renew_key()
        files = SealedFiles(vault)
        for path in sealed_paths(
            state.directory
        ):  # those that get their name later, their writers renew
            with suppress(
                FileNotFoundError, StateError
            ):  # deleted, or damaged: its reader finds out
                files.renew(path)
        with suppress(FileNotFoundError, ValueError):  # damaged: its reader finds out
            seal_secret(state.directory.root / SHARED_KEY, vault)
        yield
