"""The tables that the journal covers, and row seals: checksums in a column of their own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeAlias

import msgspec
import xxhash

Row: TypeAlias = Sequence[Any]
Key: TypeAlias = int | str

LEDGER = "ledger"
"""The one-row table that records the catalog's state."""
_USES = {"segments": frozenset(("last_used", "hits"))}
"""Columns that change with every use. They are not sealed, and changes to them are not
journalled."""
_WRAP = 1 << 64

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Table:
    """A table with seals: its key column and all columns but the seal, in order."""

    name: str
    key: str
    columns: tuple[str, ...]
    has_sequence: bool
    """The key is AUTOINCREMENT and never reused."""
    key_at: int = field(init=False, repr=False, compare=False)
    """The index of the key in a row."""
    _seed: int = field(init=False, repr=False, compare=False)
    _sealed: Callable[[Row], Row] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = [at for at, name in enumerate(self.columns) if name in self.sealed_columns]
        object.__setattr__(self, "key_at", self.columns.index(self.key))
        object.__setattr__(self, "_seed", xxhash.xxh3_64_intdigest(self.name.encode()))
        object.__setattr__(self, "_sealed", itemgetter(*places))

    @property
    def sealed_columns(self) -> tuple[str, ...]:
        """The columns that the seal covers."""
        uses = _USES.get(self.name, frozenset())
        return tuple(name for name in self.columns if name not in uses)

    def seal(self, row: Row) -> int:
        """The checksum of a row: xxh3_64 as a signed integer. Raises ValueError for values
        that no sound row has (text that is not UTF-8)."""
        return _signed(xxhash.xxh3_64_intdigest(_encode(self._sealed(row)), self._seed))


@dataclass(frozen=True, slots=True)
class Ledger:
    """Identifies the store of a catalog and the catalog's state."""

    store: int
    """A random number chosen when the store was created."""
    seq: int
    """The number of transactions so far that changed a sealed column."""
    total: int
    """The sum of the seals of all rows and of the schema, modulo 2^64, signed. It reveals
    lost or stale rows."""

    @property
    def seal(self) -> int:
        """The checksum of the ledger itself."""
        return _signed(xxhash.xxh3_64_intdigest(_encode((self.store, self.seq, self.total))))

    def after(self, delta: int) -> Ledger:
        """The state after one more transaction, whose changes added `delta` to the total."""
        return Ledger(self.store, self.seq + 1, wrapped(self.total + delta))


def tables_of(db: sqlite3.Connection) -> tuple[Table, ...]:
    """The tables of a catalog that have seals."""
    found = []
    for name, sql in db.execute(
        "SELECT name, sql FROM main.sqlite_master WHERE type = 'table' ORDER BY name"
    ).fetchall():
        info = db.execute(f"PRAGMA main.table_info({name})").fetchall()
        columns = tuple(row[1] for row in info if row[1] != "seal")
        keys = [row[1] for row in info if row[5]]
        if name != LEDGER and len(columns) < len(info) and len(keys) == 1:
            found.append(Table(name, keys[0], columns, "AUTOINCREMENT" in sql))
    return tuple(found)


def read_ledger(db: sqlite3.Connection) -> Ledger | None:
    """The ledger of a catalog; None if it is missing or its own seal is wrong."""
    rows = db.execute(f"SELECT store, seq, total, seal FROM {LEDGER}").fetchall()
    if len(rows) != 1:
        return None
    *values, seal = rows[0]
    ledger = Ledger(*values)
    return ledger if ledger.seal == seal else None


def write_ledger(db: sqlite3.Connection, ledger: Ledger) -> None:
    """Write the state, inside the transaction that leads to it."""
    db.execute(
        f"INSERT OR REPLACE INTO {LEDGER} (one, store, seq, total, seal) VALUES (1, ?, ?, ?, ?)",
        (ledger.store, ledger.seq, ledger.total, ledger.seal),
    )


def total_of(db: sqlite3.Connection, tables: Sequence[Table]) -> int:
    """The sum of the stored seals and the schema's."""
    seals = (seal for table in tables for (seal,) in db.execute(f"SELECT seal FROM {table.name}"))
    return wrapped(schema_seal(db) + sum(seals))


def schema_seal(db: sqlite3.Connection) -> int:
    """The checksum of the text of the schema."""
    rows = db.execute(
        "SELECT type, name, tbl_name, sql FROM main.sqlite_master ORDER BY type, name"
    ).fetchall()
    return _signed(xxhash.xxh3_64_intdigest(_encode(rows)))


def seal_all(db: sqlite3.Connection, tables: Sequence[Table]) -> None:
    """Set the seal of every row, inside a transaction."""
    for table in tables:
        db.create_function("seal_row", -1, lambda *row, table=table: table.seal(row))
        columns = ", ".join(table.columns)
        db.execute(f"UPDATE {table.name} SET seal = seal_row({columns})")
    db.create_function("seal_row", -1, None)


def wrapped(total: int) -> int:
    """A sum of seals modulo 2^64, as a signed integer."""
    return _signed(total % _WRAP)


def _signed(value: int) -> int:
    return value - _WRAP if value >> 63 else value
