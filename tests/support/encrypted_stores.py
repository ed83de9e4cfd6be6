"""Stores that are encrypted, with a key in a file beside them, and what their files say with it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from towerd.store.catalog.database import CatalogFile
from towerd.store.catalog.journal.journal import Chain, read_chain
from towerd.store.encryption.key_source import KeySource
from towerd.store.encryption.opening import is_encrypted
from towerd.store.encryption.vault import Vault


def key_of(root: Path) -> str:
    """Where the key of an encrypted store is, as --encrypt says it."""
    return f"file:{root.with_name(root.name + '.key')}"


def encrypt(root: Path) -> None:
    """Give a new store in `root` its keys."""
    root.mkdir(parents=True)
    Vault.create(root, KeySource.parse(key_of(root)), is_encrypting=False)


def leave_plain(root: Path) -> None:
    """A store in `root` will be as it is without --encrypt."""


KINDS: dict[str, Callable[[Path], None]] = {"plain": leave_plain, "encrypted": encrypt}


def vault_of(root: Path) -> Vault | None:
    """The keys of a store."""
    return Vault.open(root) if is_encrypted(root) else None


def connect(root: Path) -> sqlite3.Connection:
    """The catalog of a store, as any program that has its keys could open it."""
    return CatalogFile(root / "catalog.sqlite", vault_of(root)).connect()


def page_of(name: str, root: Path) -> int:
    """The offset in the catalog's file of the first page of a table or an index."""
    with closing(connect(root)) as db:
        ((page, size),) = db.execute(
            "SELECT rootpage, page_size FROM sqlite_master, pragma_page_size WHERE name = ?",
            (name,),
        ).fetchall()
    return (int(page) - 1) * int(size)


def chain_of(root: Path) -> Chain:
    """What the journal of a store has."""
    return read_chain(root / "journal", vault_of(root))
