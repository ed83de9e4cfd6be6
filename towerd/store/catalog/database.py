"""The catalog's SQLite file: opening, schema version, and error translation."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from towerd.errors import DiskFull, StoreError, StoreVersion
from towerd.store.catalog.schema import APPLICATION_ID, MIGRATIONS, SCHEMA, VERSION, VERSION_MIN

if TYPE_CHECKING:
    from towerd.store.encryption.vault import Vault

CHECKPOINT_PAGES = 512
"""Number of WAL pages (2 MiB) at which SQLite checkpoints. Idle moments do it sooner."""

_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE})
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PURPOSE = "catalog"
"""Of the key that a catalog is encrypted with."""
_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = FULL",
    "fullfsync = ON",
    "checkpoint_fullfsync = ON",
    "foreign_keys = ON",
    "trusted_schema = OFF",
    "cell_size_check = ON",
    "busy_timeout = 5000",
    "temp_store = MEMORY",
    "secure_delete = ON",
    "recursive_triggers = ON",
    f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
)


class CatalogDamaged(StoreError):
    """The catalog's content is corrupt."""


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """Where a catalog is, and the keys of its store if that is encrypted."""

    path: Path
    vault: Vault | None = None

    def beside(self, path: Path) -> CatalogFile:
        """Another file of this store."""
        return CatalogFile(path, self.vault)

    def connect(self) -> sqlite3.Connection:
        """Open or create the database without reading or changing it."""
        _create_private(self.path)
        if self.vault is not None:
            return self._encrypted(self.vault, "")
        return sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)

    def connect_reader(self, query: str = "mode=ro") -> sqlite3.Connection:
        """Open a second, read-only connection. query: of the URI."""
        if self.vault is not None:
            return self._encrypted(self.vault, query)
        uri = f"{self.path.absolute().as_uri()}?{query}"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)

    def renew(self, db: sqlite3.Connection) -> None:
        """Encrypt the database with the key in use, unless it is; `db` and all other connections to it are then of no
        use. Raises sqlite3.Error."""
        from towerd.store.encryption.sqlcipher import renew

        assert self.vault is not None
        renew(db, self.vault, _PURPOSE)

    def _encrypted(self, vault: Vault, query: str) -> sqlite3.Connection:
        from towerd.store.encryption.sqlcipher import connect

        return connect(self.path, vault, _PURPOSE, query=query)


def configure(db: sqlite3.Connection) -> None:
    """Apply the connection settings of the catalog."""
    for pragma in _PRAGMAS:
        db.execute(f"PRAGMA {pragma}")


def version_of(db: sqlite3.Connection, path: Path) -> int:
    """The schema version, 0 for an empty database. Raises StoreVersion for a database of
    another program."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if not db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall():
        return 0
    if not is_ours(db):
        raise StoreVersion(f"{path} is not a towerd catalog; choose another store directory")
    return version


def check_version(version: int, path: Path) -> None:
    """Raises StoreVersion for a schema version that this towerd does not read."""
    if not VERSION_MIN <= version <= VERSION:
        whose = "a newer towerd" if version > VERSION else "the towerd that wrote it"
        raise StoreVersion(
            f"{path} has schema version {version}, this towerd knows {VERSION}; use {whose} "
            "or another store directory"
        )


def is_ours(db: sqlite3.Connection) -> bool:
    """Whether the database is marked as a catalog."""
    return int(db.execute("PRAGMA application_id").fetchone()[0]) == APPLICATION_ID


def create(db: sqlite3.Connection, finish: Callable[[sqlite3.Connection], None]) -> None:
    """Make the tables of an empty database, in one transaction, which `finish` ends."""
    with _transaction(db, SCHEMA):
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        finish(db)


def migrate(
    db: sqlite3.Connection, version: int, finish: Callable[[sqlite3.Connection], None]
) -> None:
    """Add the tables that a catalog of an earlier version lacks, in one transaction, which `finish`
    ends."""
    steps = "".join(MIGRATIONS[each] for each in range(version, VERSION))
    with _transaction(db, steps):
        finish(db)


@contextmanager
def _transaction(db: sqlite3.Connection, script: str) -> Iterator[None]:
    """The script, and what the block adds, in one transaction that ends in this version."""
    try:
        db.executescript(f"BEGIN IMMEDIATE; {script}")
        db.execute(f"PRAGMA user_version = {VERSION}")
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


@contextmanager
def errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into DiskFull, CatalogDamaged or StoreError. Damage may also
    corrupt the text of an error, which then raises UnicodeError."""
    try:
        yield
    except sqlite3.Error as error:
        raise translated(path, error) from error
    except UnicodeDecodeError as error:
        raise damaged_in_use(path, str(error)) from error


def translated(path: Path, error: sqlite3.Error) -> StoreError:
    """The store error that corresponds to an SQLite error."""
    if getattr(error, "sqlite_errorcode", 0) in _FULL:
        return DiskFull(
            f"the catalog {path} cannot be written ({error}); free disk space or lower --warm-bytes"
        )
    if is_damage(error):
        return damaged_in_use(path, str(error))
    return StoreError(f"the catalog {path} failed: {error}")


def is_damage(error: sqlite3.Error) -> bool:
    """Whether SQLite reports that the file's content is corrupt."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in _CORRUPT or "UTF-8" in str(error)


def damaged_in_use(path: Path, what: str) -> CatalogDamaged:
    """The error for corrupt content found while a journal is kept."""
    return CatalogDamaged(
        f"the catalog {path} is damaged ({what}); restart towerd, which rebuilds it from its "
        "journal, or run towerctl verify --repair"
    )


def damaged(path: Path, what: str) -> CatalogDamaged:
    """The error for corrupt content without a journal."""
    return CatalogDamaged(
        f"the catalog {path} is damaged ({what}); put a backup in its place, or move "
        "the store directory away to begin with an empty one"
    )


def _create_private(path: Path) -> None:
    """Create the file with mode 0600 first: SQLite gives its side files the database's mode."""
    if path.exists() and not path.is_symlink():
        return  # closing a file that is open elsewhere in this process loses its locks
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.close(fd)
