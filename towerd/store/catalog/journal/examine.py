"""Integrity checks of a catalog: SQLite's own, every row's seal, and the sum of the seals."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence

from towerd.store.catalog.journal.tables import Table, read_ledger, schema_seal, wrapped

SHOWN_MAX = 20


def problems_of(db: sqlite3.Connection, tables: Sequence[Table]) -> list[str]:
    """Problems of a catalog with the current schema; empty if there are none. Reads all of it."""
    try:
        return [f"catalog: {problem}" for problem in _problems(db, tables)]
    except (sqlite3.Error, UnicodeError) as error:
        return [f"catalog: {error}"]


def _integrity_problems(db: sqlite3.Connection) -> Iterator[str]:
    """Problems that SQLite finds in pages, indexes, constraints and references."""
    for (line,) in db.execute(f"PRAGMA integrity_check({SHOWN_MAX})"):
        if line != "ok":
            yield line
    for table, row, *_ in db.execute("PRAGMA foreign_key_check"):
        yield f"dangling reference in {table} row {row}"


def _problems(db: sqlite3.Connection, tables: Sequence[Table]) -> Iterator[str]:
    yield from _integrity_problems(db)
    ledger = read_ledger(db)
    if ledger is None:
        yield "the ledger has a wrong checksum"
    total = schema_seal(db)
    for table in tables:
        wrong = []
        for *row, seal in db.execute(select(table)):
            total += seal
            if table.seal(row) != seal:
                wrong.append(row[table.key_at])
        if wrong:
            shown = ", ".join(map(repr, wrong[:SHOWN_MAX]))
            yield f"wrong checksums in {table.name}: {len(wrong)} rows, {table.key} {shown}"
    if ledger is not None and wrapped(total) != ledger.total:
        yield "rows are missing, or are those of another time"


def select(table: Table, where: str = "") -> str:
    """The query for complete rows and their seals."""
    return f"SELECT {', '.join(table.columns)}, seal FROM {table.name} {where}"
