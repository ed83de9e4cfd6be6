"""Stores as earlier builds wrote them: no journal, and native rows in planes instead of blobs."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from towerd.slots.blob import parse_blob
from towerd.slots.layout import KVLayout
from towerd.store.catalog.database import SEALED_VERSION, migrate
from towerd.store.catalog.journal.tables import (
    Ledger,
    seal_all,
    tables_of,
    total_of,
    write_ledger,
)
from towerd.store.segments.segment_header import (
    BlobEntry,
    checksum,
    decode_head,
    page_up,
    plane_shapes,
)


def as_schema_7(root: Path) -> None:
    """Turn the catalog of one fingerprint into one of the schema before tokenizers were known."""
    shutil.rmtree(root / "journal")
    old = root / "catalog.sqlite"
    new = root / "catalog.new"
    with closing(sqlite3.connect(new, isolation_level=None)) as db:
        migrate(db, 0, 7, finish=lambda db: _fill_schema_7(db, old))
    new.replace(old)


def _fill_schema_7(db: sqlite3.Connection, path: Path) -> None:
    with closing(sqlite3.connect(path)) as now:
        ((store, seq),) = now.execute("SELECT store, seq FROM ledger")
        tables = tables_of(db)
        for table in tables:
            sources = _OLD_COLUMNS.get(table.name, {})
            columns = ", ".join(sources.get(name, name) for name in table.columns)
            rows = now.execute(f"SELECT {columns} FROM {_OLD_SOURCES.get(table.name, table.name)}")
            marks = ", ".join("?" * len(table.columns))
            names = ", ".join(table.columns)
            db.executemany(f"INSERT INTO {table.name}({names}) VALUES ({marks})", rows.fetchall())
    seal_all(db, tables)
    write_ledger(db, Ledger(store, seq, total_of(db, tables)))


_ONE = {"fingerprint": "(SELECT id FROM fingerprints)"}
_OLD_COLUMNS = {
    "segments": {
        **_ONE,
        "file_row0": "coalesce(row0, 0)",
        "file_rows": "CASE WHEN file IS NULL THEN 0 ELSE p1 - p0 END",
        "id": "segments.id",
    },
    "sessions": _ONE,
    "bases": _ONE,
    "workflows": _ONE,
}
_OLD_SOURCES = {"segments": "segments LEFT JOIN views ON node = segments.id"}


def as_before_the_journal(root: Path) -> None:
    """Turn a store into what the version before the journal left."""
    as_schema_7(root)
    (root / "catalog.sqlite.clean").unlink()
    with closing(sqlite3.connect(root / "catalog.sqlite", isolation_level=None)) as db:
        tables = db.execute("SELECT name FROM sqlite_master WHERE sql LIKE '% seal INTEGER%'")
        for (name,) in tables.fetchall():
            if name != "ledger":
                db.execute(f"ALTER TABLE {name} DROP COLUMN seal")
        db.execute("DROP TABLE ledger")
        db.execute(f"PRAGMA user_version = {SEALED_VERSION - 1}")


def in_planes(data: bytes, layout: KVLayout) -> tuple[dict[str, Any], int, bytes]:
    """The header's fields, where the data began, and new data, of a file of one native run in
    one blob, without a cell extension."""
    head, start = decode_head(memoryview(data))
    (run,) = head.runs
    (blob,) = run.blobs
    rows = parse_blob(at(data, start, blob), layout=layout).rows
    entries, out = [], b""
    for shape, plane in zip(plane_shapes(layout), rows.planes(), strict=True):
        out = out.ljust(page_up(len(out)), b"\0")
        entries.append([*shape, len(out), plane.nbytes, checksum(plane.tobytes())])
        out += plane.tobytes()
    fields = msgspec.to_builtins(head, builtin_types=(bytes,))
    fields["runs"] = [[run.row0, run.n_rows, run.format, run.derived, entries]]
    return fields, start, out


def at(data: bytes, start: int, blob: BlobEntry) -> bytes:
    """The bytes of a blob."""
    return data[start + blob.offset : start + blob.offset + blob.nbytes]
