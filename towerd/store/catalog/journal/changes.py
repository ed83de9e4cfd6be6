"""The rows that a transaction changed, recorded by triggers and written as one record.

The triggers set the seal of every changed row in the same statement, so no caller can
forget the seal or the journal. They are temporary: they belong to the connection, not to
the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import zstandard

from towerd.store.catalog.journal.tables import Key, Row, Table

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


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[str, list[tuple[Any, ...]], list[Any]]]).decode


def encode_changes(changes: Iterable[TableChange]) -> bytes:
    """The payload of a frame."""
    data = _encode(list(changes))
    if len(data) < COMPRESS_BYTES_MIN:
        return data
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def decode_changes(payload: bytes) -> list[TableChange]:
    """The inverse of `encode_changes`. The payload's checksum must have been verified."""
    if payload[:4] == _ZSTD_MAGIC:
        payload = zstandard.ZstdDecompressor().decompress(payload)
    return [TableChange(*each) for each in _decode(payload)]


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
