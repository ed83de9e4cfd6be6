"""Opening a catalog together with its journal. Each can repair the other."""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from towerd.errors import StoreError, StoreVersion
from towerd.store.catalog import database
from towerd.store.catalog.journal.clean import was_closed_cleanly
from towerd.store.catalog.journal.compact import rewrite
from towerd.store.catalog.journal.examine import problems_of
from towerd.store.catalog.journal.files import UNFINISHED, Journal
from towerd.store.catalog.journal.rebuild import rebuild, replay
from towerd.store.catalog.journal.tables import (
    Ledger,
    Table,
    read_ledger,
    tables_of,
    total_of,
    write_ledger,
)
from towerd.store.catalog.schema import VERSION
from towerd.store.files import durable
from towerd.store.files.directory import remove_file

log = logging.getLogger(__name__)

LONG_CHECK_BYTES = 32 << 20
"""A catalog of this size takes about a second to check, so the check is logged."""
_SIDE_FILES = ("-wal", "-shm")


@dataclass(frozen=True, slots=True)
class OpenedCatalog:
    """A sound catalog and its journal, in the same state."""

    db: sqlite3.Connection
    tables: Sequence[Table]
    ledger: Ledger
    journal: Journal
    notes: Sequence[str]
    """What was recovered, in sentences."""


def open_catalog(path: Path) -> OpenedCatalog:
    """Open or create the catalog at `path`, beside `journal/`, `quarantine/` and `segments/`.

    It is checked unless it was closed cleanly. A damaged or missing catalog is rebuilt from
    its journal, and the old file is quarantined. A catalog that lacks the last changes
    receives them, and an incomplete journal is rewritten. Raises StoreVersion, CatalogDamaged
    (there is nothing to recover from), DiskFull, StoreError, sqlite3.Error or OSError."""
    return _Opening(path).open()


def rebuild_catalog(path: Path, journal: Journal, why: str) -> str:
    """Replace the catalog at `path`, which must not be open, with one rebuilt from its
    journal, and move the old one to `quarantine/`. Returns a description of the result.
    Raises sqlite3.Error, OSError, or CatalogDamaged if there is nothing to rebuild from."""
    chain = journal.read()
    if chain.is_empty:
        raise database.damaged(path, why)
    database.check_version(chain.schema, journal.folder)
    new = journal.folder / ("catalog" + UNFINISHED)
    old = path if path.exists() else None
    rebuilt = rebuild(new, chain, old, path.with_name("tokenizers"))
    kept = _swap(new, path)
    note = f"The catalog was rebuilt from its journal ({why}): {rebuilt}."
    if kept is not None:
        note += f" What was there is in quarantine as {kept}."
    log.warning("%s", note)
    return note


class _Opening:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._journal = Journal(path.with_name("journal"), VERSION)
        self._chain = self._journal.read()
        self._notes: list[str] = []

    def open(self) -> OpenedCatalog:
        db = self._connect()
        try:
            tables = tables_of(db)
            ledger = _ledger_of(db)
            self._begin_journal(db, tables, ledger)
        except BaseException:
            self._journal.close()
            db.close()
            raise
        return OpenedCatalog(db, tables, ledger, self._journal, self._notes)

    # --- the catalog ----------------------------------------------------------------------

    def _connect(self) -> sqlite3.Connection:
        """Connect to a catalog, which is then sound and of the current schema."""
        is_clean = was_closed_cleanly(self._path)
        is_there = self._path.exists() and self._path.stat().st_size > 0
        if not is_there and not self._chain.is_empty:
            self._rebuild("it was missing")
            return self._load(is_clean=True)
        if not is_there and any(self._path.with_name("segments").glob("*")):
            raise StoreError(
                f"the catalog {self._path} is missing or empty, and so is its journal, but there "
                "are segment files beside it: put a backup of the catalog or of the journal folder "
                "back, or move the store directory away to begin with an empty one"
            )
        try:
            return self._load(is_clean=is_clean)
        except StoreVersion:
            raise
        except sqlite3.Error as error:
            if not _may_be_damage(error):
                raise
            why = str(error)
        except (database.CatalogDamaged, UnicodeError) as error:
            why = str(error)
        self._rebuild(why)
        return self._load(is_clean=True)

    def _load(self, *, is_clean: bool) -> sqlite3.Connection:
        """Raises CatalogDamaged (its message only describes the damage) or sqlite3.Error."""
        db = database.connect(self._path)
        try:
            if not self._chain.is_empty and not database.is_ours(db):
                raise database.CatalogDamaged("it says that it is another program's")
            version = database.version_of(db, self._path)
            database.configure(db)
            if version < self._chain.schema:
                raise database.CatalogDamaged(f"it says schema version {version}")
            database.check_version(version or VERSION, self._path)
            if version == 0:
                database.create(db, _begin_ledger)
            elif not is_clean:
                self._check(db)
            self._catch_up(db)
        except BaseException:
            db.close()
            raise
        return db

    def _check(self, db: sqlite3.Connection) -> None:
        n_bytes = self._path.stat().st_size
        if n_bytes >= LONG_CHECK_BYTES:
            log.info("checking the catalog after an unclean stop", extra={"bytes": n_bytes})
        if problems := problems_of(db, tables_of(db)):
            raise database.CatalogDamaged(problems[0].removeprefix("catalog: "))

    def _catch_up(self, db: sqlite3.Connection) -> None:
        """Apply the last changes that a catalog lacks."""
        ledger = _ledger_of(db)
        if not self._chain.is_empty and self._chain.store != ledger.store:
            # one of them was put here: whichever gave way, all its conversations would be gone
            raise StoreError(
                f"the catalog {self._path} and the journal beside it are of different stores: move "
                "away the one that does not belong here; the other one then replaces it"
            )
        n = self._chain.last - ledger.seq
        if n <= 0:
            return
        is_told = self._chain.has_all_after(ledger.seq)
        if not is_told or not replay(db, tables_of(db), self._chain, ledger):
            raise database.CatalogDamaged(
                f"it lacked {n:,} changes, and its journal lacks some of them"
            )
        note = f"The catalog lacked its last {n:,} changes: they were taken from its journal."
        log.warning("%s", note)
        self._notes.append(note)

    def _rebuild(self, why: str) -> None:
        with database.errors(self._path):
            self._notes.append(rebuild_catalog(self._path, self._journal, why))

    # --- the journal ----------------------------------------------------------------------

    def _begin_journal(
        self, db: sqlite3.Connection, tables: Sequence[Table], ledger: Ledger
    ) -> None:
        """Append to the journal from now on; rewrite it first if it is incomplete."""
        chain = self._chain
        is_right = chain.is_whole and chain.end == ledger.seq and not chain.is_damaged
        is_right = is_right and (chain.is_empty or chain.schema == VERSION)
        if chain.is_damaged:
            self._set_journal_aside("It was damaged")
        self._journal.begin(self._chain, ledger.store, ledger.seq)
        if is_right:
            return
        try:
            rewrite(self._journal, db, tables)
        except OSError as error:
            self._journal.is_behind = True
            log.error("the journal could not be written", extra={"error": str(error)})

    def _set_journal_aside(self, why: str) -> None:
        kept = self._journal.set_aside(lambda path: _set_aside(path, self._path) is not None)
        note = f"The journal was rewritten from the catalog. {why}: {kept} files are in quarantine."
        log.warning("%s", note)
        self._notes.append(note)
        self._chain = self._journal.read()


def _ledger_of(db: sqlite3.Connection) -> Ledger:
    ledger = read_ledger(db)
    if ledger is None:
        raise database.CatalogDamaged("the ledger has a wrong checksum")
    return ledger


def _begin_ledger(db: sqlite3.Connection) -> None:
    """Say which store a new catalog is of."""
    write_ledger(db, Ledger(secrets.randbits(63), 0, total_of(db, tables_of(db))))


def _swap(new: Path, path: Path) -> str | None:
    """Replace the catalog with `new`; returns the old one's name in quarantine. The side
    files are moved first: a WAL must never meet a database that it does not belong to."""
    kept = None
    if path.exists():
        kept = _set_aside(path, path, copy=True)
    for suffix in _SIDE_FILES:
        side = path.with_name(path.name + suffix)
        if side.exists():
            _set_aside(side, path)
            remove_file(side)
    durable.sync_dir(path.parent)
    os.replace(new, path)
    durable.sync_dir(path.parent)
    return kept


def _set_aside(file: Path, catalog: Path, *, copy: bool = False) -> str | None:
    """Move a file to quarantine, or copy it there with `copy`. Returns its name there, or
    None on failure."""
    folder = catalog.with_name("quarantine")
    name = f"{time.time_ns()}-{file.name}"
    moves: Sequence[Callable[[Path, Path], None]] = (os.link, os.rename) if copy else (os.rename,)
    for move in moves:
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            move(file, folder / name)
            os.utime(folder / name, follow_symlinks=False)
            return name
    return None


def _may_be_damage(error: sqlite3.Error) -> bool:
    """Whether an error at opening may come from the file's content. Other errors come from
    the disk or from other programs."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    if code in (sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ):
        return True
    return code & 0xFF not in _NOT_DAMAGE


_NOT_DAMAGE = frozenset(
    (
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_PROTOCOL,
    )
)
