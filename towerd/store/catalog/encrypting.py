"""Encrypting a store that has content. Killed, it continues at the next start."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from contextlib import closing, suppress
from pathlib import Path

from towerd.store.catalog.encrypted_catalog import PLAIN, encrypt_catalog
from towerd.store.encryption.sealed_files import SealedFiles, is_sealed, sealed_paths
from towerd.store.encryption.secret_file import SHARED_KEY, seal_secret
from towerd.store.encryption.vault import Vault
from towerd.store.files import durable
from towerd.store.files.directory import Directory
from towerd.store.files.file_map import PLAIN_FILES

log = logging.getLogger(__name__)


def encrypt_store(directory: Directory, vault: Vault) -> None:
    """Encrypt all that a store has, and overwrite what it replaces. Nothing else may use the store. Raises DiskFull
    or StoreError; the rest is encrypted at the next start."""
    log.warning("the store is being encrypted", extra={"store": str(directory.root)})
    with durable.store_errors(f"the store {directory.root} cannot be encrypted"):
        directory.sweep_tmp()
        encrypt_catalog(directory.root, vault)
        for path in directory.quarantine.iterdir():
            durable.erase(path)
        for path in sealed_paths(directory):
            if not is_sealed(path):
                _seal(path, directory, vault)
        if (key := directory.root / SHARED_KEY).exists():
            with suppress(ValueError):  # damaged, as its reader says
                seal_secret(key, vault)
        shutil.rmtree(directory.root / PLAIN, ignore_errors=True)
        vault.finish_encrypting()


def _seal(path: Path, directory: Directory, vault: Vault) -> None:
    """The plain file keeps a second name until it is overwritten, so that a kill does not lose it."""
    n_bytes = path.stat().st_size
    plain = directory.root / PLAIN
    plain.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError, PermissionError, NotImplementedError):  # no hard links here
        os.link(path, plain / path.name, follow_symlinks=False)
    half = directory.tmp / f"{secrets.token_hex(8)}.half"
    with (
        closing(PLAIN_FILES.map(path, n_bytes)) as content,
        SealedFiles(vault).create(half, path, n_bytes) as file,
    ):
        with memoryview(content) as view:
            file.write(view, 0)
    durable.erase(plain / path.name)
