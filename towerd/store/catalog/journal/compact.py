"""Journal compaction: one snapshot of the catalog replaces everything before it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence

from towerd.store.catalog.database import CatalogDamaged
from towerd.store.catalog.journal.changes import TableChange
from towerd.store.catalog.journal.examine import select
from towerd.store.catalog.journal.files import Journal
from towerd.store.catalog.journal.tables import (
    Ledger,
    Row,
    Table,
    read_ledger,
    schema_seal,
    wrapped,
)

CHUNK_ROWS = 1000


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
    journal.is_behind = False
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
    for table in tables:
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
