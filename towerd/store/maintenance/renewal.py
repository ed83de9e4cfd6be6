"""Renewing the keys of an encrypted store, so that what was deleted from it cannot be read any more.

Deleting a file, or a row of a database, leaves its blocks on the disk until something else is written there, and an
SSD may keep them for long. All of a store is sealed with its keys, so what these blocks hold is gone once the keys are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from towerd.errors import StoreError
from towerd.slots.errors import StateError
from towerd.store.encryption.sealed_files import SealedFiles, sealed_paths
from towerd.store.encryption.secret_file import SHARED_KEY, seal_secret
from towerd.store.encryption.vault import Vault
from towerd.store.files import durable
from towerd.store.state.state import StoreState

_PAUSE_S = 0.01
_WRITING_S_MAX = 600.0
"""How long files are waited for that were being written."""


@contextmanager
def keys_renewed(state: StoreState, vault: Vault) -> Iterator[None]:
    """Seal all of a store with a new key, and destroy the earlier ones when the block has ended without an error:
    it has to renew what else the store's owner has sealed. Killed or failed, both keys stay, and the next renewal
    destroys them. Raises DiskFull or StoreError."""
    with durable.store_errors("the keys of the store cannot be renewed"):
        vault.begin_renewal()
        written = set(state.catalog.writing())
        state.catalog.renew_key()
        files = SealedFiles(vault)
        _renew_files(state, files)
        _wait_for(state, written)  # files that were begun with an earlier key
        _renew_files(state, files)
        with suppress(FileNotFoundError, ValueError, StateError):
            seal_secret(state.directory.root / SHARED_KEY, vault)
        yield
        vault.end_renewal()


def _renew_files(state: StoreState, files: SealedFiles) -> None:
    for path in sealed_paths(state.directory):
        with suppress(FileNotFoundError, StateError):  # deleted, or damaged: its reader finds out
            files.renew(path)


def _wait_for(state: StoreState, names: set[str]) -> None:
    """Until none of these files is being written any more. Raises StoreError if one takes too long."""
    deadline = time.monotonic() + _WRITING_S_MAX
    while names & set(state.catalog.writing()):
        if time.monotonic() > deadline:
            raise StoreError(
                "the keys of the store cannot be renewed: a file is being written; try again"
            )
        time.sleep(_PAUSE_S)
