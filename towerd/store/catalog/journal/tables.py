"""The tables that the journal covers, row seals (checksums in a column of their own), and the rows that
a transaction changed.

Triggers record the changed rows and set the seal of each in the same statement, so no caller can
forget the seal or the journal. They are temporary: they belong to the connection, not to the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import msgspec
import xxhash
import zstandard

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


def reseal_schema(db: sqlite3.Connection, seal_before: int) -> None:
    """Write the state of a catalog whose schema has changed, inside the transaction that changed it;
    seal_before: what `schema_seal` was. A wrong ledger stays wrong."""
    ledger = read_ledger(db)
    if ledger is not None:
        total = wrapped(ledger.total - seal_before + schema_seal(db))
        write_ledger(db, Ledger(ledger.store, ledger.seq, total))


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


COMPRESS_BYTES_MIN = 512
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_LEVEL = 1


class TableChange(NamedTuple):
    """The changes of one table."""

    table: str
    rows: Sequence[Row]
    """New and changed rows: every column but the seal."""
    gone: Sequence[Key]
    """Keys of deleted rows."""


_encode_changes = msgspec.msgpack.Encoder().encode
_decode_changes = msgspec.msgpack.Decoder(list[tuple[str, list[tuple[Any, ...]], list[Any]]]).decode


def encode_changes(changes: Iterable[TableChange]) -> bytes:
    """The payload of a frame."""
    data = _encode_changes(list(changes))
    if len(data) < COMPRESS_BYTES_MIN:
        return data
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def decode_changes(payload: bytes) -> list[TableChange]:
    """The inverse of `encode_changes`. The payload's checksum must have been verified."""
    if payload[:4] == _ZSTD_MAGIC:
        payload = zstandard.ZstdDecompressor().decompress(payload)
    return [TableChange(*each) for each in _decode_changes(payload)]


class ChangeRecorder:
    """Records the changes of the running transaction on one connection."""

    def __init__(self, db: sqlite3.Connection, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._rows: dict[tuple[int, Key], Row | None] = {}
        self._delta = 0
        db.create_function("seal_changed", -1, self._changed)
        db.create_function("seal_gone", 3, self._gone)
        for number, table in enumerate(tables):
            for statement in _triggers(number, table):
                db.execute(statement)

    def clear(self) -> None:
        """Discard the recorded changes when the transaction ends."""
        self._rows.clear()
        self._delta = 0

    @property
    def delta(self) -> int:
        """The difference that the changes so far make to the total of the seals."""
        return self._delta

    def changes(self) -> list[TableChange]:
        """The changes so far, by table."""
        found: dict[int, TableChange] = {}
        for (number, key), row in self._rows.items():
            change = found.get(number)
            if change is None:
                change = found[number] = TableChange(self._tables[number].name, [], [])
            into: Any = change.gone if row is None else change.rows
            into.append(key if row is None else row)
        return list(found.values())

    def _changed(self, number: int, seal_before: int, *row: Any) -> int:
        table = self._tables[number]
        seal = table.seal(row)
        self._rows[number, row[table.key_at]] = row
        self._delta += seal - seal_before
        return seal

    def _gone(self, number: int, seal_before: int, key: Key) -> None:
        self._rows[number, key] = None
        self._delta -= seal_before


def _triggers(number: int, table: Table) -> list[str]:
    name, key = table.name, table.key
    row = ", ".join(f"new.{column}" for column in table.columns)
    sealed = ", ".join(table.sealed_columns)

    def seal(before: str) -> str:
        return (
            f"BEGIN UPDATE {name} SET seal = seal_changed({number}, {before}, {row})"
            f" WHERE {key} = new.{key}; END"
        )

    return [
        f"CREATE TEMP TRIGGER {name}_entered AFTER INSERT ON main.{name} {seal('0')}",
        f"CREATE TEMP TRIGGER {name}_changed AFTER UPDATE OF {sealed} ON main.{name} {seal('old.seal')}",
        f"CREATE TEMP TRIGGER {name}_gone AFTER DELETE ON main.{name}"
        f" BEGIN SELECT seal_gone({number}, old.seal, old.{key}); END",
    ]


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
