"""Opening a catalog together with its journal. Each can repair the other.

A clean stop leaves a mark: the checksum of the whole catalog file. If it matches, the file is bit for
bit what was written, and a start has nothing to check. A stale mark left by a crash does not match
a catalog changed since, so the mark needs no fsync.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from towerd.errors import StoreError, StoreVersion
from towerd.store.catalog import database
from towerd.store.catalog.database import CatalogDamaged, CatalogFile
from towerd.store.catalog.journal.journal import UNFINISHED, Journal
from towerd.store.catalog.journal.rebuild import rebuild, replay
from towerd.store.catalog.journal.tables import (
    Ledger,
    Row,
    Table,
    TableChange,
    problems_of,
    read_ledger,
    reseal_schema,
    schema_seal,
    select,
    tables_of,
    total_of,
    wrapped,
    write_ledger,
)
from towerd.store.catalog.schema import VERSION
from towerd.store.catalog.vocabularies import Vocabularies
from towerd.store.files import durable
from towerd.store.files.directory import remove_file

log = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20
CHUNK_ROWS = 1000
LONG_CHECK_BYTES = 32 << 20
"""A catalog of this size takes about a second to check, so the check is logged."""
_SIDE_FILES = ("-wal", "-shm")
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


def was_closed_cleanly(path: Path) -> bool:
    """Whether the catalog is as the last clean stop left it. Removes the mark, because the
    catalog is about to change."""
    mark = _mark(path)
    try:
        expected = mark.read_bytes()
        mark.unlink()
        return not _has_wal(path) and _checksum(path) == expected
    except OSError:
        return False


def mark_clean(path: Path) -> None:
    """Record that the catalog was closed with all its changes."""
    with suppress(OSError):
        if _has_wal(path):
            return
        fd = os.open(
            _mark(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        with os.fdopen(fd, "wb") as file:
            file.write(_checksum(path))


def _mark(path: Path) -> Path:
    return path.with_name(path.name + ".clean")


def _has_wal(path: Path) -> bool:
    wal = path.with_name(path.name + "-wal")
    return wal.exists() and wal.stat().st_size > 0


def _checksum(path: Path) -> bytes:
    h = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            h.update(block)
    return h.digest()


def rewrite(journal: Journal, db: sqlite3.Connection, tables: Sequence[Table]) -> None:
    """Write a snapshot of the catalog as `db` sees it, in its own transaction, and begin a
    new log after it. Raises OSError, sqlite3.Error or CatalogDamaged; the journal then keeps
    its old content."""
    db.execute("BEGIN")
    try:
        write_snapshot(journal, db, tables, begin_snapshot(journal, db))
    finally:
        db.execute("COMMIT")


def begin_snapshot(journal: Journal, db: sqlite3.Connection) -> Ledger:
    """Fix the state that `db` sees in its read transaction, and direct later changes to a new
    log. No transaction may end meanwhile."""
    ledger = read_ledger(db)
    if ledger is None:
        raise CatalogDamaged("the ledger has a wrong checksum")
    journal.rotate(ledger.seq)
    return ledger


def write_snapshot(
    journal: Journal, db: sqlite3.Connection, tables: Sequence[Table], ledger: Ledger
) -> None:
    """Write every row. The catalog may change meanwhile; `db` still sees the old state."""
    try:
        sequences = _sequences(db, tables)
        journal.write_snapshot(ledger.store, ledger.seq, _dump(db, tables, ledger), sequences)
    except BaseException:
        journal.is_behind = True
        raise


def _dump(db: sqlite3.Connection, tables: Sequence[Table], ledger: Ledger) -> Iterator[TableChange]:
    """Every row, in chunks. Raises CatalogDamaged if a row is wrong or missing."""
    total = schema_seal(db)
    # where it is read over older rows, sessions make way for what is theirs
    for table in sorted(tables, key=lambda table: table.name != "sessions"):
        rows: list[Row] = []
        for *row, seal in db.execute(select(table)):
            if table.seal(row) != seal:
                raise CatalogDamaged(f"wrong checksum in {table.name}, row {row[table.key_at]!r}")
            total += seal
            rows.append(row)
            if len(rows) == CHUNK_ROWS:
                yield TableChange(table.name, rows, [])
                rows = []
        if rows:
            yield TableChange(table.name, rows, [])
    if wrapped(total) != ledger.total:
        raise CatalogDamaged("rows are missing, or are those of another time")


def _sequences(db: sqlite3.Connection, tables: Sequence[Table]) -> dict[str, int]:
    names = {table.name for table in tables if table.has_sequence}
    found = db.execute("SELECT name, seq FROM sqlite_sequence").fetchall()
    return {name: seq for name, seq in found if name in names}


@dataclass(frozen=True, slots=True)
class OpenedCatalog:
    """A sound catalog and its journal, in the same state."""

    db: sqlite3.Connection
    tables: Sequence[Table]
    ledger: Ledger
    journal: Journal
    notes: Sequence[str]
    """What was recovered, in sentences."""


def open_catalog(file: CatalogFile) -> OpenedCatalog:
    """Open or create the catalog, beside `journal/`, `quarantine/` and `segments/`.

    It is checked unless it was closed cleanly. A damaged or missing catalog is rebuilt from
    its journal, and the old file is quarantined. A catalog that lacks the last changes
    receives them, and an incomplete journal is rewritten. Raises StoreVersion, CatalogDamaged
    (there is nothing to recover from), DiskFull, StoreError, sqlite3.Error or OSError."""
    return _Opening(file).open()


def rebuild_catalog(file: CatalogFile, journal: Journal, why: str) -> str:
    """Replace the catalog, which must not be open, with one rebuilt from its
    journal, and move the old one to `quarantine/`. Returns a description of the result.
    Raises sqlite3.Error, OSError, or CatalogDamaged if there is nothing to rebuild from."""
    path, chain = file.path, journal.read()
    if chain.is_empty:
        raise database.damaged(path, why)
    database.check_version(chain.schema, journal.folder)
    new = file.beside(journal.folder / ("catalog" + UNFINISHED))
    old = file if path.exists() else None
    rebuilt = rebuild(new, chain, old, _vocabularies(file))
    kept = _swap(new.path, path)
    note = f"The catalog was rebuilt from its journal ({why}): {rebuilt}."
    if kept is not None:
        note += f" What was there is in quarantine as {kept}."
    log.warning("%s", note)
    return note


class _Opening:
    def __init__(self, file: CatalogFile) -> None:
        self._file, self._path = file, file.path
        self._journal = Journal(file.path.with_name("journal"), VERSION, file.vault)
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
        db = self._file.connect()
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
            if version and version != VERSION:
                self._migrate(db, version)
        except BaseException:
            db.close()
            raise
        return db

    def _migrate(self, db: sqlite3.Connection, version: int) -> None:
        """Bring a catalog of an earlier version to this one. Until the journal is rewritten, it has the
        tables of the earlier one, which are all that there is something in."""
        seal = schema_seal(db)
        database.migrate(db, version, lambda db: reseal_schema(db, seal))
        log.info("the catalog has new tables", extra={"was": version, "version": VERSION})

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
            self._notes.append(rebuild_catalog(self._file, self._journal, why))

    # --- the journal ----------------------------------------------------------------------

    def _begin_journal(
        self, db: sqlite3.Connection, tables: Sequence[Table], ledger: Ledger
    ) -> None:
        """Append to the journal from now on; rewrite it first if it is incomplete."""
        chain = self._chain
        is_right = chain.is_whole and chain.end == ledger.seq and not chain.is_damaged
        is_right = is_right and (chain.is_empty or chain.schema == VERSION)
        is_right = is_right and not (self._file.vault is not None and chain.is_plain)
        if chain.is_damaged:
            how = "A power cut had cut it short" if chain.is_cut_short else "It was damaged"
            self._set_journal_aside(how)
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


def _vocabularies(file: CatalogFile) -> Vocabularies:
    """Those that are kept beside a catalog."""
    folder = file.path.with_name("tokenizers")
    if file.vault is None:
        return Vocabularies(folder)
    from towerd.store.encryption.sealed_files import SealedFiles

    return Vocabularies(folder, SealedFiles(file.vault))


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
