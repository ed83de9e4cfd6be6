"""Opening a store's directory and catalog: alone, or beside other processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from towerd.slots.fingerprint import Fingerprint
from towerd.store.catalog.catalog import Catalog
from towerd.store.catalog.identity import ModelIdentity
from towerd.store.catalog.shared.remote import RemoteCatalog
from towerd.store.catalog.sqlite import SqliteCatalog
from towerd.store.files.directory import Directory
from towerd.store.files.lock import StoreLock

WhichModel: TypeAlias = (
    Fingerprint | ModelIdentity | Callable[[Catalog], Fingerprint | ModelIdentity]
)
"""A fingerprint, alone or with what is known of the tokenizer, or a function that finds it in the
opened catalog."""


def open_catalog(root: Path, catalog_fd: int | None, undo: ExitStack) -> tuple[Directory, Catalog]:
    """The directory of a store and its catalog; `undo` closes them. `catalog_fd`: as for
    `Store.open`. Raises as `Store.open`."""
    directory = Directory(root)
    if catalog_fd is not None:
        remote = RemoteCatalog(catalog_fd)
        undo.callback(remote.close)
        return directory, remote
    lock_file = StoreLock(directory.lock)
    undo.callback(lock_file.release)
    catalog = SqliteCatalog(directory.catalog)
    undo.callback(catalog.close)
    directory.sweep_tmp()
    return directory, catalog


def identify(model: WhichModel, catalog: Catalog) -> ModelIdentity:
    """The identity of the model to open a store for."""
    found = model(catalog) if callable(model) else model
    return ModelIdentity(found) if isinstance(found, Fingerprint) else found
