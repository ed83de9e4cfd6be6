"""The catalog: one SQLite connection, durable transactions, errors that say what to do."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from towerd.errors import DiskFull, StoreError, StoreVersion
from towerd.slots.errors import StateError
from towerd.slots.fingerprint import Fingerprint
from towerd.store.schema import APPLICATION_ID, MIGRATIONS, VERSION

Undo: TypeAlias = list[Callable[[], None]]

_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE})
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


@dataclass(frozen=True, slots=True)
class KnownFingerprint:
    """A fingerprint that the store has seen, `opened` at that Unix time for the last time."""

    pk: int
    fingerprint: Fingerprint
    opened: float


class Catalog:
    """The database file. Not thread-safe by itself: the store's lock guards it."""

    def __init__(self, path: Path) -> None:
        """Open or create. Raises StoreError, StoreVersion, DiskFull or OSError."""
        self.path = path
        _create_private(path)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            with self._errors():
                self._configure()
                self._migrate()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Fold the WAL into the database and close it."""
        with self._errors():
            self._db.close()

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        with self._errors():
            return self._db.execute(sql, params).fetchall()

    def run(self, sql: str, params: Sequence[Any] = ()) -> int:
        """One statement inside a transaction; the row id of an INSERT, else meaningless."""
        assert self._db.in_transaction
        return self._db.execute(sql, params).lastrowid or 0

    def run_many(self, sql: str, params: Sequence[Sequence[Any]]) -> None:
        """One statement for many parameter sets, inside a transaction."""
        assert self._db.in_transaction
        self._db.executemany(sql, params)

    @contextmanager
    def transaction(self) -> Iterator[Undo]:
        """Durable when the block has ended without an error. The block appends to the list what
        takes its changes in memory back; on any error the database and they are undone."""
        undo: Undo = []
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield undo
                self._db.execute("COMMIT")
            except BaseException:
                for step in reversed(undo):
                    step()
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def get_meta(self, key: str) -> str | None:
        """A small value kept for other modules (the model hash cache, for example)."""
        rows = self.rows("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def set_meta(self, key: str, value: str) -> None:
        """Durable when it returns."""
        with self.transaction():
            self.run("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def fingerprints(self) -> list[KnownFingerprint]:
        """Every fingerprint of the store, the last opened first."""
        found = []
        for pk, text, opened in self.rows(
            "SELECT id, json, opened FROM fingerprints ORDER BY opened DESC, id DESC"
        ):
            try:
                value = msgspec.json.decode(text)
                found.append(KnownFingerprint(pk, Fingerprint.from_json(value), opened))
            except (StateError, msgspec.DecodeError) as error:
                raise self.damaged(f"fingerprint {pk}: {error}") from error
        return found

    def enter_fingerprint(self, fingerprint: Fingerprint, now: float) -> int:
        """The key of `fingerprint`, entered if it is new."""
        digest = fingerprint.digest()
        text = msgspec.json.encode(fingerprint.to_json()).decode()
        known = self.rows("SELECT id FROM fingerprints WHERE digest = ?", (digest,))
        # a known one can be opened on a full disk: that is when one must get in to evict
        with suppress(DiskFull) if known else nullcontext(), self.transaction():
            pk = self.run(
                "INSERT INTO fingerprints(digest, json, created, opened) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (digest) DO UPDATE SET opened = excluded.opened",
                (digest, text, now, now),
            )
        return int(known[0][0]) if known else pk

    def bytes_on_disk(self) -> int:
        """Size of the database and its WAL."""
        paths = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(path.stat().st_size for path in paths if path.exists())

    def quick_check(self) -> list[str]:
        """What SQLite itself finds wrong; empty when nothing."""
        try:
            found = [str(row[0]) for row in self._db.execute("PRAGMA quick_check(20)")]
            found += [f"dangling reference in {row[0]} row {row[1]}" for row in self._db.execute(
                "PRAGMA foreign_key_check")]  # fmt: skip
        except sqlite3.Error as error:
            return [f"catalog: {error}"]
        return [f"catalog: {line}" for line in found if line != "ok"]

    def _configure(self) -> None:
        for pragma in (
            "journal_mode = WAL", "synchronous = FULL", "fullfsync = ON",
            "checkpoint_fullfsync = ON", "foreign_keys = ON", "trusted_schema = OFF",
            "cell_size_check = ON", "busy_timeout = 5000",
        ):  # fmt: skip
            self._db.execute(f"PRAGMA {pragma}")

    def _migrate(self) -> None:
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        owner = int(self._db.execute("PRAGMA application_id").fetchone()[0])
        is_empty = not self._db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
        if (owner, version) != (APPLICATION_ID, VERSION) and not is_empty:
            if owner != APPLICATION_ID:
                raise StoreVersion(
                    f"{self.path} is not a towerd catalog; choose another store directory"
                )
            if not 0 < version <= VERSION:
                raise StoreVersion(
                    f"{self.path} has schema version {version}, this towerd knows up to "
                    f"{VERSION}; use a newer towerd or another store directory"
                )
        for number, script in enumerate(MIGRATIONS[version:], version + 1):
            self._db.executescript(
                f"BEGIN IMMEDIATE; {script} PRAGMA application_id = {APPLICATION_ID};"
                f"PRAGMA user_version = {number}; COMMIT;"
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def _translated(self, error: sqlite3.Error) -> StoreError:
        code = getattr(error, "sqlite_errorcode", 0)
        if code in _FULL:
            return DiskFull(
                f"the catalog {self.path} cannot be written ({error}); free disk space or "
                "lower --warm-bytes"
            )
        if code & 0xFF in _CORRUPT or "UTF-8" in str(error):
            return self.damaged(str(error))
        return StoreError(f"the catalog {self.path} failed: {error}")

    def damaged(self, what: str) -> StoreError:
        """The error for content that cannot be right."""
        return StoreError(
            f"the catalog {self.path} is damaged ({what}); put a backup in its place, or move "
            "the store directory away to begin with an empty one"
        )


def latest_fingerprint(catalog: Catalog) -> Fingerprint:
    """The fingerprint that was opened last, for tools that have no model at hand.

    Raises StoreError for an empty store."""
    known = catalog.fingerprints()
    if not known:
        raise StoreError(f"the store {catalog.path.parent} is empty: nothing was served from it")
    return known[0].fingerprint


def _create_private(path: Path) -> None:
    """SQLite gives its side files the mode of the database, so make that 0600 first."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.close(fd)
