"""Maintenance of the catalog and its journal, in idle moments and on request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Protocol

from towerd.errors import StoreError
from towerd.store.catalog import database
from towerd.store.catalog.journal.compact import begin_snapshot, write_snapshot
from towerd.store.catalog.journal.files import Journal
from towerd.store.catalog.journal.tables import Table
from towerd.store.files.durable import store_errors

log = logging.getLogger(__name__)

Lock = Callable[[], AbstractContextManager[None]]


class MaintainedCatalog(Protocol):
    """`SqliteCatalog` as its maintenance sees it."""

    path: Path
    journal: Journal
    tables: Sequence[Table]
    is_doubtful: bool

    def problems(self) -> list[str]: ...

    def journal_problems(self) -> list[str]: ...

    def flush(self, *, truncate: bool = False) -> None: ...

    def heal(self, why: str) -> None: ...

    def note(self, recovered: str) -> None: ...


class CatalogUpkeep:
    """Thread-safe. `lock()` is the store's lock; it is not held while a snapshot is written."""

    def __init__(self, catalog: MaintainedCatalog, lock: Lock) -> None:
        self._catalog = catalog
        self._lock = lock
        self._compacting = threading.Lock()
        """Taken before the store's lock."""
        self._failure = ""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No snapshot is written inside the block."""
        with self._compacting:
            yield

    def rest(self) -> None:
        """Idle maintenance: rebuild a damaged database, checkpoint the WAL, sync the journal,
        and rewrite it if it has grown or is incomplete. Failures are logged."""
        with self._logged():
            with self._lock():
                if self._catalog.is_doubtful:
                    self._catalog.heal("it failed a check")
                self._catalog.flush()
                journal = self._catalog.journal
                is_due = journal.is_grown or journal.is_behind or journal.is_lost
            if is_due:
                self.compact()

    def purge(self) -> None:
        """Rewrite the journal and empty the WAL, so that no file retains deleted data.
        Failures are logged."""
        with self._logged():
            with self._lock():
                is_due = self._catalog.journal.has_history
            if is_due:
                self.compact()
            with self._lock():  # a killed process may have left a log of its own
                self._catalog.flush(truncate=True)

    def repair(self) -> None:
        """Rebuild a damaged database from the journal, or rewrite a damaged journal from the
        database. Raises CatalogDamaged if both are damaged, DiskFull or StoreError."""
        with self._compacting, self._lock():
            if problems := self._catalog.problems():
                self._catalog.heal(problems[0].removeprefix("catalog: "))
            is_journal_wrong = bool(self._catalog.journal_problems())
        if is_journal_wrong:
            self.compact()
            self._catalog.note("The journal was rewritten from the catalog.")

    def compact(self) -> None:
        """Replace the journal with one snapshot of the catalog. Raises CatalogDamaged,
        DiskFull or StoreError; the journal then keeps its content."""
        catalog = self._catalog
        failures = database.errors(catalog.path), store_errors("the journal cannot be written")
        with self._compacting, failures[0], failures[1]:
            with self._lock():
                reader = database.connect_reader(catalog.path)
                try:
                    reader.execute("BEGIN")
                    ledger = begin_snapshot(catalog.journal, reader)
                except BaseException:
                    reader.close()
                    raise
            with closing(reader):
                write_snapshot(catalog.journal, reader, catalog.tables, ledger)

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Log a failure of the block, but a repeated one only once: it is retried in the next
        idle moment."""
        try:
            yield
            self._failure = ""
        except StoreError as error:
            if isinstance(error, database.CatalogDamaged):
                self._catalog.is_doubtful = True
            if error.message != self._failure:
                log.error("the catalog or its journal failed", extra={"error": error.message})
            self._failure = error.message
