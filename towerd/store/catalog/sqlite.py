"""The catalog of this process: one SQLite connection, and the journal that follows it."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from towerd.errors import DiskFull, StoreError
from towerd.store.catalog import database, lost_tokenizers
from towerd.store.catalog.catalog import Catalog
from towerd.store.catalog.database import CatalogDamaged, CatalogFile
from towerd.store.catalog.identity import TokenizerIdentity
from towerd.store.catalog.journal.rebuild import drop_wrong, step_back
from towerd.store.catalog.journal.recover import (
    begin_snapshot,
    mark_clean,
    open_catalog,
    rebuild_catalog,
    rewrite,
    write_snapshot,
)
from towerd.store.catalog.journal.tables import (
    ChangeRecorder,
    TableChange,
    problems_of,
    read_ledger,
    select,
    write_ledger,
)
from towerd.store.files.durable import store_errors
from towerd.store.files.writes import DailyWrites, WalMeter

if TYPE_CHECKING:
    from towerd.store.encryption.vault import Vault

log = logging.getLogger(__name__)

_T = TypeVar("_T")

SHRINK_BYTES_MIN = 4 << 20
"""Smaller savings are not worth a copy of the database."""
_REMOVED = (errno.ENOENT, "it was removed from outside, or could not be written again")


class SqliteCatalog(Catalog):
    """The database file and its journal."""

    lock: threading.RLock

    def __init__(
        self, path: Path, writes: DailyWrites | None = None, vault: Vault | None = None
    ) -> None:
        """Open or create the catalog; `open_catalog` describes recovery. writes: where written bytes
        are counted; vault: the keys of an encrypted store. Raises StoreError, StoreVersion, DiskFull or OSError."""
        self.path = path
        self._file = CatalogFile(path, vault)
        self._writes, self._meter, self._n_journalled = writes, WalMeter(path), 0
        self.lock = threading.RLock()
        with self._errors():
            opened = open_catalog(self._file)
        self.journal, self.tables = opened.journal, opened.tables
        self._ledger = opened.ledger
        self._use(opened.db)
        self._recovered = list(opened.notes)
        self._is_flushed = False
        self._is_doubtful = False
        """The database is damaged and could not be rebuilt at once."""
        self._is_closed = False
        self._writing = Counter[str]()
        self._telling = threading.Lock()
        self._compacting = threading.Lock()
        """Taken before `lock`, which is free while a snapshot is written."""
        self._failure = ""
        """The failure that was logged last."""
        self._lacking = _REMOVED
        """The number and the text of the error that kept changes out of the journal."""
        self.committed: Callable[[Sequence[TableChange]], None] | None = None
        """Called with the changes of each transaction once it is durable."""

    def close(self) -> None:
        """Fold the WAL into the database and close both."""
        self._is_closed = True
        with self._errors():
            with suppress(OSError):
                if self.journal.is_behind and not self._is_doubtful:
                    self._complete_journal()
                self.journal.sync()
            self.journal.close()
            self._db.close()
        if not self._is_doubtful:
            mark_clean(self.path)

    def _complete_journal(self) -> None:
        """Write what a full disk kept out of it, if there is room now. Raises OSError."""
        with suppress(sqlite3.Error, CatalogDamaged):
            rewrite(self.journal, self._db, self.tables)

    # --- using it -------------------------------------------------------------------------

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._healed(lambda: self._db.execute(sql, params).fetchall())

    def sealed(self, table: str, where: str, params: Sequence[Any]) -> list[dict[str, Any]]:
        kind = next(each for each in self.tables if each.name == table)

        def read() -> list[dict[str, Any]]:
            found = self._db.execute(select(kind, f"WHERE {where}"), params).fetchall()
            for *row, seal in found:
                if kind.seal(row) != seal:
                    raise CatalogDamaged(f"wrong checksum in {table}, row {row[kind.key_at]!r}")
            return [dict(zip(kind.columns, row, strict=False)) for row in found]

        return self._healed(read)

    def run(self, sql: str, params: Sequence[Any] = ()) -> int:
        assert self._db.in_transaction
        return self._db.execute(sql, params).lastrowid or 0

    def run_many(self, sql: str, params: Sequence[Sequence[Any]]) -> None:
        assert self._db.in_transaction
        self._db.executemany(sql, params)

    # --- looking after it -----------------------------------------------------------------

    @property
    def recovered(self) -> Sequence[str]:
        return self._recovered

    def _note(self, recovered: str) -> None:
        """Record what was recovered, in a sentence."""
        self._recovered.append(recovered)

    def writing(self) -> Collection[str]:
        with self._telling:
            return frozenset(self._writing)

    def begin_file(self, name: str) -> None:
        with self._telling:
            self._writing[name] += 1

    def end_file(self, name: str) -> None:
        with self._telling:
            self._writing[name] -= 1
            self._writing = +self._writing  # without those at 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._compacting:
            yield

    def rest(self) -> None:
        with self._logged():
            with self._locked():
                if self._is_doubtful:
                    self._heal("it failed a check")
                self._flush()
                journal = self.journal
                is_due = journal.is_grown or journal.is_behind or journal.is_lost
            if is_due:
                self._compact()

    def purge(self) -> None:
        with self._logged():
            with self._locked():
                is_due = self.journal.has_history
            if is_due:
                self._compact()
            with self._locked():  # a killed process may have left a log of its own
                self._flush(truncate=True)

    def renew_key(self) -> None:
        with self._compacting, self._locked():
            self._renew_database()
        self._compact()
        with self._locked():
            self._flush(truncate=True)

    def _renew_database(self) -> None:
        """Raises CatalogDamaged, DiskFull or StoreError; it then has the key that it had."""
        try:
            with self._errors():
                self._file.renew(self._db)
        except StoreError:
            self._reconnect()
            if not self.problems():
                raise
            self._heal("a page of it could not be read to encrypt it again")
        else:
            self._reconnect()

    def repair(self) -> None:
        with self._compacting, self._locked():
            if problems := self.problems():
                self._heal(problems[0].removeprefix("catalog: "))
            is_journal_wrong = bool(self.journal_problems())
        if is_journal_wrong:
            self._compact()
            self._note("The journal was rewritten from the catalog.")

    def sizes(self) -> tuple[int, int]:
        paths = (self.path, self.path.with_name(self.path.name + "-wal"))
        n_bytes = sum(path.stat().st_size for path in paths if path.exists())
        return n_bytes, self.journal.nbytes()

    def shrink(self) -> None:
        pragmas = ("page_size", "page_count", "freelist_count")
        size, n, n_free = (int(self.rows(f"PRAGMA {name}")[0][0]) for name in pragmas)
        if n_free * size < SHRINK_BYTES_MIN or n_free < n // 2:
            return
        with suppress(DiskFull):
            self.rows("VACUUM")
            self.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def problems(self) -> list[str]:
        found = problems_of(self._db, self.tables)
        if not found and read_ledger(self._db) != self._ledger:
            found.append("catalog: it is in another state than it was left in")
        return found

    def journal_problems(self) -> list[str]:
        try:
            chain = self.journal.read()
        except OSError as error:
            return [f"journal: {error.strerror}"]
        damaged = [file.path.name for file in chain.files if file.is_damaged]
        if damaged:
            return [f"journal: {name} is damaged" for name in damaged]
        if chain.end != self._ledger.seq or not chain.is_whole:
            return [f"journal: it has {chain.end:,} changes of {self._ledger.seq:,}"]
        return []

    def sync_journal(self) -> None:
        self._sync_records()
        with store_errors("the journal lacks changes until it is written again"):
            if not self.journal.is_complete:
                raise OSError(*self._lacking)

    def _sync_records(self) -> None:
        with store_errors("the journal cannot be synced"):
            self.journal.sync()

    def _flush(self, *, truncate: bool = False) -> None:
        """Checkpoint the WAL into the database and sync the journal. Meant for idle moments.
        `truncate` empties the WAL. Raises StoreError."""
        if self._is_flushed and not truncate:
            return
        with self._errors():
            self._db.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if truncate else 'PASSIVE'})")
        self._sync_records()
        self._is_flushed = True
        self._count_writes()

    def _count_writes(self) -> None:
        """Count what was written since the last call."""
        if self._writes is not None:
            n_journalled, self._n_journalled = self._n_journalled, self.journal.n_written
            self._writes.add("journal", self._n_journalled - n_journalled)
            self._writes.add("catalog", self._meter.written())

    def _heal(self, why: str) -> None:
        """Replace the damaged database with one rebuilt from the journal. Raises
        CatalogDamaged if the journal does not have exactly this state; the next start then
        recovers what the journal has."""
        assert not self._db.in_transaction
        chain = self.journal.read()
        if not chain.is_whole or (chain.store, chain.end) != (self._ledger.store, self._ledger.seq):
            self._reconnect()
            raise database.damaged_in_use(self.path, why)
        with suppress(sqlite3.Error):
            self._db.close()
        try:
            with self._errors(), store_errors("the catalog cannot be rebuilt"):
                self._note(rebuild_catalog(self._file, self.journal, why))
            self._is_doubtful = False
        finally:
            self._connect()

    def _reconnect(self) -> None:
        """Make an encrypted catalog readable after a damaged page or a new key, see `CipherConnection`."""
        if self._file.vault is not None:
            before = self._db
            self._connect()  # first: on a full disk SQLite's files could not be made again
            with suppress(sqlite3.Error):
                before.close()

    def _connect(self) -> None:
        with self._errors():
            db = self._file.connect()
            database.configure(db)
            self._use(db)

    # --- inside ---------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. Raises StoreError if the catalog is closed."""
        with self.lock:
            if self._is_closed:
                raise StoreError("the store is closed")
            yield

    def _compact(self) -> None:
        """Replace the journal with one snapshot of the catalog. Raises CatalogDamaged,
        DiskFull or StoreError; the journal then keeps its content."""
        failures = database.errors(self.path), store_errors("the journal cannot be written")
        with self._compacting, failures[0], failures[1]:
            with self._locked():
                reader = self._file.connect_reader()
                try:
                    reader.execute("BEGIN")
                    ledger = begin_snapshot(self.journal, reader)
                except BaseException:
                    reader.close()
                    raise
            with closing(reader):
                write_snapshot(self.journal, reader, self.tables, ledger)
            with self._locked():
                self._lacking = _REMOVED
                self._count_writes()

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Log a failure of the block, but a repeated one only once: it is retried in the next
        idle moment."""
        try:
            yield
            self._failure = ""
        except StoreError as error:
            if isinstance(error, database.CatalogDamaged):
                self._is_doubtful = True
            if error.message != self._failure:
                log.error("the catalog or its journal failed", extra={"error": error.message})
            self._failure = error.message

    def _use(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._watch = ChangeRecorder(db, self.tables)

    def recognise_lost(self, wanted: TokenizerIdentity) -> int | None:
        found = lost_tokenizers.recognise(self._db, wanted)
        if found is None:
            return None
        pk, digest = found
        with self.transaction():
            self.run(
                "UPDATE tokenizers SET digest = ?, pieces = ?, rules = ? WHERE id = ?",
                (digest, wanted.pieces, wanted.rules, pk),
            )
            self.run("PRAGMA defer_foreign_keys = ON")
            drop_wrong(self._db)
            step_back(self._db)
        return pk

    def _begin(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._is_flushed = False

    def _commit(self) -> None:
        changes = self._watch.changes()
        if changes:
            self._commit_changes(changes)
        else:
            self._db.execute("COMMIT")
        self._watch.clear()
        self._count_writes()
        if changes and self.committed is not None:
            self.committed(changes)

    def _roll_back(self, error: BaseException) -> None:
        self._is_doubtful |= isinstance(error, sqlite3.Error) and database.is_damage(error)
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        finally:
            self._watch.clear()

    def _commit_changes(self, changes: Sequence[TableChange]) -> None:
        """The changes reach the journal before the database: a kill in between leaves the journal
        ahead, and the next start replays it."""
        ledger = self._ledger.after(self._watch.delta)
        write_ledger(self._db, ledger)
        is_journalled = False
        try:
            is_journalled = self._journal_changes(ledger.seq, changes)
            self._db.execute("COMMIT")
        except BaseException:
            if is_journalled:
                self.journal.take_back()
            raise
        self._ledger = ledger

    def _journal_changes(self, seq: int, changes: Sequence[TableChange]) -> bool:
        """Journal the changes; returns False on failure. Without room for the second copy the
        catalog alone keeps them, and the journal is rewritten at the next idle moment with
        room."""
        if _removes_blob(changes) and not self.journal.is_complete:
            self.journal.is_behind = True
            return False  # it may lack the tokens that the blob has
        try:
            self.journal.append(seq, changes)
        except OSError as error:
            if not self.journal.is_behind:
                log.error("the journal cannot be written", extra={"error": str(error)})
            self.journal.is_behind = True
            self._lacking = error.errno or errno.EIO, error.strerror or str(error)
            return False
        return True

    def _healed(self, read: Callable[[], list[_T]]) -> list[_T]:
        """Return the result of `read`; rebuild the database first if it is damaged."""
        try:
            return read()
        except (sqlite3.Error, CatalogDamaged, UnicodeError) as error:
            if isinstance(error, sqlite3.Error) and not database.is_damage(error):
                raise database.translated(self.path, error) from error
            self._is_doubtful = True
            if self._db.in_transaction:
                raise database.damaged_in_use(self.path, str(error)) from error
            self._heal(str(error))
        with self._errors():
            return read()

    def _errors(self) -> AbstractContextManager[None]:
        return database.errors(self.path)


def _removes_blob(changes: Sequence[TableChange]) -> bool:
    """Whether a session loses its blob and stays."""
    gone = {change.table: set(change.gone) for change in changes}
    return not gone.get("blobs", set()) <= gone.get("sessions", set())
