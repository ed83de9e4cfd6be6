"""Encrypting the catalog, its journal and what is derived of them. Killed at any point, it continues at the next call.

The catalog gives way to an encrypted copy in one rename; from then on it is opened with the vault, which reads both plain
and sealed records of the journal until all of the store is encrypted. Before that, what is to be overwritten gets a second
name in `plain/`, so that it is found again after a kill.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from towerd.errors import StoreError
from towerd.store.catalog import database
from towerd.store.catalog.database import CatalogFile
from towerd.store.catalog.journal.journal import UNFINISHED, read_chain, seq_of
from towerd.store.catalog.journal.tables import problems_of, tables_of
from towerd.store.catalog.sqlite import SqliteCatalog
from towerd.store.encryption.vault import Vault
from towerd.store.files import durable

PLAIN = "plain"
_HALF = "catalog.half"
_SEARCH = "search.sqlite"
"""The index of `towerd.search`, which is made again."""
_SIDES = ("", "-wal", "-shm")
_BY_HAND = ("application_id", "user_version")
"""What sqlcipher_export does not copy."""


def encrypt_catalog(root: Path, vault: Vault) -> None:
    """Encrypt the catalog of the store in `root`, which nothing else may use, and its journal; remove its search index,
    and what was set aside of all these; and overwrite what was plain. Raises CatalogDamaged, StoreVersion, DiskFull,
    StoreError or OSError; the store then works on, and the next call continues."""
    file = CatalogFile(root / "catalog.sqlite", vault)
    journal = root / "journal"
    has_any = file.path.exists() or (journal.is_dir() and any(journal.iterdir()))
    if has_any:
        if not _is_converted(file, journal):
            _convert(file, journal)
        _seal_journal(file)
    for name in _SIDES:
        durable.erase(root / (_SEARCH + name))
    for path in (*_set_aside(root / "quarantine"), *_files(root / PLAIN)):
        durable.erase(path)
    with suppress(FileNotFoundError):
        (root / PLAIN).rmdir()


def _is_converted(file: CatalogFile, journal: Path) -> bool:
    """Whether the encrypted catalog has taken the plain one's place."""
    chain = read_chain(journal, file.vault) if journal.is_dir() else None
    if chain is not None and any(each.is_sealed for part in chain.files for each in part.frames):
        return True
    if not file.path.exists() or not file.path.stat().st_size:
        return False
    with closing(file.connect()) as db:
        try:
            return database.is_ours(db)
        except sqlite3.Error:
            return False


def _convert(file: CatalogFile, journal: Path) -> None:
    path, root = file.path, file.path.parent
    half = file.beside(root / _HALF)
    unfinished = [each for each in _files(journal) if UNFINISHED in each.name]
    for left in (half.path, *unfinished, *_files(root / PLAIN)):  # a killed call's
        durable.erase(left)
    _fold(path)
    with database.errors(path):
        _export(path, half)
    (root / PLAIN).mkdir(mode=0o700, exist_ok=True)
    for each in (path, *_files(journal)):
        with suppress(OSError):  # some file systems have no second names
            os.link(each, root / PLAIN / each.name)
    durable.sync_dir(root / PLAIN)
    durable.sync_dir(root)
    os.replace(half.path, path)
    durable.sync_dir(root)


def _fold(path: Path) -> None:
    """Recover the plain catalog as any start does, fold its WAL into it, and overwrite that."""
    catalog = SqliteCatalog(path)
    wal = -1
    try:
        with suppress(FileNotFoundError):
            name = path.with_name(path.name + "-wal")
            wal = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        catalog.close()
        if wal >= 0:
            durable.overwrite(wal)
    finally:
        if wal >= 0:
            os.close(wal)


def _export(path: Path, into: CatalogFile) -> None:
    """Write an encrypted copy of a closed catalog, durably. Raises CatalogDamaged, sqlite3.Error or OSError."""
    with closing(into.connect()) as db:
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("PRAGMA synchronous = OFF")
        db.execute(
            "ATTACH DATABASE ? AS plain KEY ''", (f"{path.absolute().as_uri()}?immutable=1",)
        )
        db.execute("SELECT sqlcipher_export('main', 'plain')").fetchall()
        for name in _BY_HAND:
            (value,) = db.execute(f"PRAGMA plain.{name}").fetchone()
            db.execute(f"PRAGMA main.{name} = {value}")
        db.execute("DETACH DATABASE plain")
        problems = problems_of(db, tables_of(db))
    if problems:
        raise database.CatalogDamaged(f"the encrypted copy of {path} is wrong: {problems[0]}")
    fd = os.open(into.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        durable.sync(fd)
    finally:
        os.close(fd)


def _seal_journal(file: CatalogFile) -> None:
    """Opening a catalog with its vault rewrites a journal with plain records."""
    catalog = SqliteCatalog(file.path, vault=file.vault)
    try:
        catalog.sync_journal()
        if catalog.journal.read().is_plain:
            raise StoreError(f"the journal {catalog.journal.folder} could not be sealed")
    finally:
        catalog.close()


def _set_aside(quarantine: Path) -> Iterator[Path]:
    """Catalogs and parts of journals in the quarantine."""
    for path in _files(quarantine):
        _, _, name = path.name.partition("-")
        if name.startswith("catalog.") or seq_of(Path(name)) is not None:
            yield path


def _files(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
