"""Rebuilding a catalog from its journal and the readable rows of a damaged one.

Lost data stays visibly missing (`settle`): a turn without its segments keeps its lengths, so that
serving it raises an error and never yields other tokens; its session is served up to the last turn
that has its own. A segment is kept only if its key is that of its whole prefix, rows only if they
are those of its positions.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from towerd.store.catalog import database, lost_tokenizers
from towerd.store.catalog.database import CatalogFile
from towerd.store.catalog.journal.journal import Chain
from towerd.store.catalog.journal.reused_keys import (
    KnownSessions,
    drop_foreign,
    forget_replaced,
)
from towerd.store.catalog.journal.tables import (
    Ledger,
    Row,
    Table,
    TableChange,
    read_ledger,
    schema_seal,
    seal_all,
    select,
    tables_of,
    total_of,
    wrapped,
    write_ledger,
)
from towerd.store.catalog.vocabularies import Vocabularies
from towerd.store.files import durable
from towerd.store.files.directory import remove_file
from towerd.store.segments.segment_header import segment_key
from towerd.store.tree.scope import public_of

_PREFIX_LOST = {("segments", "parent"), ("responses", "parent")}
"""References in which NULL means the root, which would be another prefix."""
_UNREADABLE = (sqlite3.Error, UnicodeError)
"""A damaged database may put bytes that are not text into its errors."""
_KEY_MAX = (1 << 63) - 1
_HAS_TOKENS = "(reply_node IS NOT NULL OR n_cached = 0)"
_LOST_ENDS = (
    "SELECT pk, leaf FROM sessions WHERE cold_bytes = 0 AND n_tokens > 0 AND NOT EXISTS"
    f" (SELECT 1 FROM turns WHERE turns.id = leaf AND {_HAS_TOKENS})"
)
_OF_SESSION = (
    "session = :pk AND turns.created >= (SELECT created FROM sessions WHERE pk = turns.session)"
)
"""Of one whose row id was used again, older turns may be left."""
_TURN_BEFORE = (
    f"SELECT parent, iif({_HAS_TOKENS}, id, NULL) FROM turns WHERE id = :id AND {_OF_SESSION}"
)
_LAST_WHOLE_TURN = f"SELECT max(id) FROM turns WHERE {_OF_SESSION} AND {_HAS_TOKENS}"
_DROP_MISPLACED_VIEWS = """
DELETE FROM views WHERE id IN (
    SELECT views.id FROM views
    JOIN segments ON segments.id = node
    JOIN files ON files.id = file
    WHERE files.p0 + row0 != segments.p0 OR row0 + segments.p1 - segments.p0 > n_rows
)"""
_DROP_OLDER_VIEWS = """
DELETE FROM views WHERE id NOT IN (
    SELECT max(views.id) FROM views JOIN files ON files.id = file GROUP BY node, fingerprint
)"""
_NEEDED = (
    "SELECT 1 FROM segments WHERE parent = :id"
    " UNION ALL SELECT 1 FROM turns WHERE prompt_node = :id"
    " UNION ALL SELECT 1 FROM turns WHERE reply_node = :id"
    " UNION ALL SELECT 1 FROM pins WHERE node = :id"
    " UNION ALL SELECT 1 FROM bases WHERE node = :id"
    " UNION ALL SELECT 1 FROM cold WHERE base = :id LIMIT 1"
)
"""Whether anything needs a segment."""
_DEEPEST_FIRST = (
    "SELECT id FROM segments WHERE id IN (SELECT value FROM json_each(?)) ORDER BY p0 DESC"
)


def settle(db: sqlite3.Connection, vocabularies: Vocabularies) -> tuple[str, ...]:
    """Remove or empty references to missing rows, inside a transaction. Returns a description
    of what is lost. `vocabularies`: those that are kept, which tell of tokenizers."""
    n_sessions = _count_of(
        db, "SELECT count(*) FROM (SELECT pk FROM sessions UNION SELECT session FROM turns)"
    )
    n_unknown = lost_tokenizers.restore(db, vocabularies)
    drop_wrong(db)
    drop_foreign(db)
    _cut_dangling(db)
    found = {
        "tokenizers, whose conversations are listed until their model is served": n_unknown,
        "sessions": n_sessions - _count_of(db, "SELECT count(*) FROM sessions"),
        "turns without their tokens": _count_of(
            db,
            "SELECT count(*) FROM turns LEFT JOIN cold ON cold.session = turns.session"
            " AND frozen = 1 WHERE reply_node IS NULL AND n_cached > 0 AND cold.session IS NULL",
        ),
        "sessions without their last turn": _count_of(
            db, "SELECT count(*) FROM sessions WHERE leaf IS NULL AND n_tokens > 0"
        ),
        "frozen sessions without their tokens": _count_of(
            db,
            "SELECT count(*) FROM sessions LEFT JOIN blobs ON session = pk"
            " WHERE cold_bytes > 0 AND session IS NULL",
        ),
    }
    step_back(db)
    lost = [f"{n:,} {what}" for what, n in found.items() if n]
    return tuple(lost or ["perhaps a few changes that nothing tells of"])


def drop_wrong(db: sqlite3.Connection) -> None:
    """Remove segments that are not where they should be, references to missing rows, and what says of
    a file that it has rows that it cannot have."""
    _cut_dangling(db)
    while _drop_wrong_segments(db):
        _cut_dangling(db)
    db.execute(_DROP_MISPLACED_VIEWS)
    db.execute(_DROP_OLDER_VIEWS)
    db.execute("DELETE FROM files WHERE id NOT IN (SELECT file FROM views)")


def step_back(db: sqlite3.Connection) -> None:
    """Let each session whose last turn has lost its tokens end with the turn before that still has its
    own, if there is one."""
    for pk, leaf in db.execute(_LOST_ENDS).fetchall():
        before, at = None, leaf
        while before is None and at is not None:
            found = db.execute(_TURN_BEFORE, {"id": at, "pk": pk}).fetchone()
            parent, before = found or (None, None)
            at = parent if parent is not None and parent < at else None
        if before is None:
            (before,) = db.execute(_LAST_WHOLE_TURN, {"pk": pk}).fetchone()
        if before is not None:
            db.execute(
                "UPDATE sessions SET leaf = turns.id, n_tokens = n_prompt + n_reply FROM turns"
                " WHERE pk = ? AND turns.id = ?",
                (pk, before),
            )


def dangling(db: sqlite3.Connection) -> list[tuple[Any, ...]]:
    """(table, row, referenced table, reference number) of every reference to a missing row."""
    return db.execute("PRAGMA foreign_key_check").fetchall()


def _cut_dangling(db: sqlite3.Connection) -> None:
    """Empty references to missing rows, or remove rows that are meaningless without them."""
    while rows := dangling(db):
        for table, row, _, number in rows:
            references = db.execute(f"PRAGMA foreign_key_list({table})").fetchall()
            column = next(each[3] for each in references if each[0] == number)
            info = db.execute(f"PRAGMA table_info({table})")
            needed = {name for _, name, _, not_null, _, key in info if not_null or key}
            if column in needed or (table, column) in _PREFIX_LOST:
                db.execute(f"DELETE FROM {table} WHERE rowid = ?", (row,))
            else:
                db.execute(f"UPDATE {table} SET {column} = NULL WHERE rowid = ?", (row,))


def _count_of(db: sqlite3.Connection, query: str) -> int:
    return int(db.execute(query).fetchone()[0])


def _drop_wrong_segments(db: sqlite3.Connection) -> int:
    """Remove segments whose key does not match their prefix or that begin like a sibling;
    returns how many. The keys of an unknown tokenizer are checked once it is known."""
    digests = dict(db.execute("SELECT id, digest FROM tokenizers"))
    known = {pk for (pk,) in db.execute("SELECT id FROM tokenizers WHERE pieces != ''")}
    children: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
    every = set()
    for row in db.execute(
        "SELECT tokenizer, coalesce(parent, 0), id, scope, p0, p1, key, ids FROM segments"
        " ORDER BY p1 DESC, id"
    ):
        children.setdefault(row[:2], []).append(row[2:])
        every.add(row[2])
    right = set()
    stack = [(pk, 0, "public", b"") for pk in digests]
    while stack:
        pk, parent, above, prefix = stack.pop()
        places = set()
        for id, scope, p0, p1, key, ids in children.get((pk, parent), ()):
            whole = prefix + ids
            place = scope, ids[:4]
            is_right = 4 * p0 == len(prefix) and 4 * p1 == len(whole) and place not in places
            is_right = is_right and (not parent or above in (public_of(scope), scope))
            if is_right and (pk not in known or segment_key(digests[pk], scope, whole) == key):
                places.add(place)
                right.add(id)
                stack.append((pk, id, scope, whole))
    db.executemany("DELETE FROM segments WHERE id = ?", [(id,) for id in every - right])
    return len(every - right)


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The content of a rebuilt catalog."""

    sessions: int
    turns: int
    lost: tuple[str, ...]
    """What neither the journal nor the damaged catalog had."""
    is_proven: bool
    """The old catalog's state is known, so nothing else is lost."""

    def __str__(self) -> str:
        what = f"{self.sessions:,} sessions with {self.turns:,} turns"
        if self.lost:
            return f"{what}; lost: {', '.join(self.lost)}"
        return f"{what}, nothing lost" if self.is_proven else what


def rebuild(
    new: CatalogFile, chain: Chain, old: CatalogFile | None, vocabularies: Vocabularies
) -> Rebuilt:
    """Write the catalog `new`, durably, in the schema of the journal, which is not empty.

    If the journal is complete up to the state of the old catalog, only the journal is used.
    Otherwise the sound rows of the old catalog are applied in between: they are newer than
    the changes up to its state and older than those after it. `vocabularies`: see `settle`. Raises sqlite3.Error, OSError,
    or CatalogDamaged if the two belong to different stores."""
    remove_file(new.path)
    with closing(new.connect()) as db:
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "trusted_schema = OFF"):
            db.execute(f"PRAGMA {pragma}")
        database.create(db, lambda _: None)
        tables = tables_of(db)
        source = _DamagedCatalog.open(old, tables)
        try:
            rebuilt = _fill(db, tables, chain, source, vocabularies)
        finally:
            if source is not None:
                source.db.close()
    fd = os.open(new.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        durable.sync(fd)
    finally:
        os.close(fd)
    return rebuilt


def replay(db: sqlite3.Connection, tables: Sequence[Table], chain: Chain, ledger: Ledger) -> bool:
    """Apply every change after the state of a sound catalog, in one transaction. Returns
    False and changes nothing if the result would not be sound. Raises sqlite3.Error or
    OSError."""
    db.execute("PRAGMA foreign_keys = OFF")
    db.execute("BEGIN IMMEDIATE")
    try:
        filler = Filler(db, tables)
        filler.apply_all(chain.changes(after=ledger.seq))
        filler.set_sequences({})
        is_sound = not dangling(db)
        if is_sound:
            write_ledger(db, Ledger(ledger.store, chain.last, total_of(db, tables)))
        db.execute("COMMIT" if is_sound else "ROLLBACK")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    finally:
        db.execute("PRAGMA foreign_keys = ON")
    return is_sound


class Filler:
    """Writes journal rows into a catalog, inside a transaction. Reference checks are off; the
    references hold again at the end."""

    def __init__(self, db: sqlite3.Connection, tables: Sequence[Table]) -> None:
        self._db = db
        self._tables = {table.name: table for table in tables}
        self._sequences = {table.name: 0 for table in tables if table.has_sequence}

    def apply_all(self, transactions: Iterable[Sequence[TableChange]]) -> None:
        """Apply several sets of changes in order."""
        for changes in transactions:
            self.apply(changes)

    def apply_rooted(self, transactions: Iterable[Sequence[TableChange]]) -> None:
        """Apply changes after lost ones, each as far as it leaves what was there before the gap
        whole: a segment stays as it is if the one that it would continue is lost, and it stays if
        something needs it. A whole prefix belongs to the id of a segment, so what is there is never
        another's."""
        for changes in transactions:
            segments = [each for each in changes if each.table == "segments"]
            self.apply([each for each in changes if each.table != "segments"])
            for change in segments:
                self._use_keys(change)  # those that stay away are used, too
                self.apply([TableChange(change.table, self._rooted(change.rows), [])])
                for (id,) in self._db.execute(_DEEPEST_FIRST, (str(change.gone),)).fetchall():
                    if not self._db.execute(_NEEDED, {"id": id}).fetchall():
                        self.apply([TableChange(change.table, [], [id])])

    def _rooted(self, rows: Sequence[Row]) -> list[Row]:
        """The segments of one transaction whose prefix is there up to the root."""
        columns = self._tables["segments"].columns
        id_at, parent_at, p0_at, p1_at = (columns.index(n) for n in ("id", "parent", "p0", "p1"))
        mine, found = {row[id_at] for row in rows}, dict[int | None, int]({None: 0})
        rooted = []
        for row in sorted(rows, key=lambda row: row[p0_at]):  # a parent ends where this begins
            parent = row[parent_at]
            if parent not in found and parent not in mine:
                ends = self._db.execute("SELECT p1 FROM segments WHERE id = ?", (parent,))
                found.update((parent, p1) for (p1,) in ends)
            if found.get(parent) == row[p0_at]:
                found[row[id_at]] = row[p1_at]
                rooted.append(row)
        return rooted

    def apply(self, changes: Sequence[TableChange]) -> None:
        """Delete and insert the rows of one transaction, and what is left of sessions that these
        replace."""
        forget_replaced(self._db, self._tables, changes)
        for name, rows, gone in changes:
            table = self._tables[name]
            self._db.executemany(
                f"DELETE FROM {name} WHERE {table.key} = ?", [(key,) for key in gone]
            )
            marks = ", ".join("?" * (len(table.columns) + 1))
            self._db.executemany(
                f"INSERT OR REPLACE INTO {name} ({', '.join(table.columns)}, seal)"
                f" VALUES ({marks})",
                [(*row, table.seal(row)) for row in rows],
            )
            self._use_keys(TableChange(name, rows, gone))

    def _use_keys(self, change: TableChange) -> None:
        """Note the keys of a table that never uses one again."""
        name, rows, gone = change
        if name in self._sequences:
            at = self._tables[name].key_at
            self._sequences[name] = max([self._sequences[name], *gone, *(row[at] for row in rows)])

    def set_sequences(self, known: dict[str, int]) -> None:
        """Prevent the reuse of any key that was ever used."""
        for name, seen in self._sequences.items():
            top = max(seen, known.get(name, 0))
            rows = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (name,))
            now = max((row[0] for row in rows.fetchall()), default=0)
            self._db.execute("DELETE FROM sqlite_sequence WHERE name = ?", (name,))
            self._db.execute("INSERT INTO sqlite_sequence VALUES (?, ?)", (name, max(top, now)))


@dataclass(slots=True)
class _DamagedCatalog:
    """A damaged catalog that is partly readable."""

    file: CatalogFile
    db: sqlite3.Connection
    tables: tuple[Table, ...]
    """Those of its version, which may be an earlier one."""
    ledger: Ledger | None

    @classmethod
    def open(cls, file: CatalogFile | None, tables: Sequence[Table]) -> _DamagedCatalog | None:
        """None if even the list of tables is unreadable."""
        if file is None:
            return None
        try:
            db = _reader(file)
        except sqlite3.Error:
            return None
        try:
            found = tables_of(db)
            if found and set(found) <= set(tables):
                catalog = cls(file, db, found, None)
                try:
                    catalog.ledger = read_ledger(db)
                except _UNREADABLE:
                    catalog._reconnect()
                return catalog
        except _UNREADABLE:
            pass
        db.close()
        return None

    def _reconnect(self) -> None:
        """Make the catalog readable after a damaged page, behind which a connection to an encrypted one reads
        nothing."""
        if self.file.vault is not None:
            self.db.close()
            self.db = _reader(self.file)

    def sound_rows(self, into: sqlite3.Connection) -> Iterator[list[TableChange]]:
        """Every readable row with a valid seal, table by table, to be entered one by one in the catalog
        `into`; without rows that may be another session's than the one of their number there."""
        known = KnownSessions(into, {table.name: table for table in self.tables})
        first = {"sessions": 0, "turns": 1}
        for table in sorted(self.tables, key=lambda table: first.get(table.name, 2)):
            yield [known.own(TableChange(table.name, list(self._sound_rows(table)), []))]

    def has_total(self, total: int, schema: int) -> bool:
        """Whether its rows had the same seals as those of the catalog with this total and seal of the
        schema."""
        if self.ledger is None:
            return False
        return wrapped(self.ledger.total - schema_seal(self.db)) == wrapped(total - schema)

    def _sound_rows(self, table: Table) -> Iterator[Row]:
        """Past an unreadable place, reading continues at ever higher keys; what that skips is read last, from
        its end on."""
        gaps: list[tuple[int, int]] = []
        at: Any = None
        before, step = 0, 1
        while at is None or at <= _KEY_MAX:
            asked = at
            try:
                for *row, seal in self._rows(table, at, None):
                    if step > 1:
                        gaps.append((before, asked))
                    at, step = row[table.key_at], 1
                    if _has_seal(table, row, seal):
                        yield row
                if step > 1:
                    gaps.append((before, asked))
                break
            except _UNREADABLE:
                if isinstance(at, str):
                    break
                before = (at or 0) if step == 1 else before
                at, step = (at or 0) + step, 2 * step
        for before, asked in gaps:
            with suppress(*_UNREADABLE):
                for *row, seal in self._rows(table, before, asked + 1, "DESC"):
                    if _has_seal(table, row, seal):
                        yield row

    def _rows(self, table: Table, low: Any, high: Any, order: str = "ASC") -> Iterator[Row]:
        """The rows with keys between two, None for no limit, and their seals. Raises at an unreadable one."""
        is_up = order == "ASC"
        try:
            for row in self._found(table, low, high, order):
                low, high = (row[table.key_at], high) if is_up else (low, row[table.key_at])
                yield row
        except _UNREADABLE:
            self._reconnect()
            try:  # the cursor read a row further than what it gave
                yield from self._found(table, low, high, f"{order} LIMIT 1").fetchall()
            except _UNREADABLE:
                self._reconnect()
            raise

    def _found(self, table: Table, low: Any, high: Any, order: str) -> sqlite3.Cursor:
        limits = [(f"{table.key} > ?", low), (f"{table.key} < ?", high)]
        limits = [each for each in limits if each[1] is not None]
        where = f"WHERE {' AND '.join(text for text, _ in limits)}" if limits else ""
        sql = select(table, f"{where} ORDER BY {table.key} {order}")
        return self.db.execute(sql, [value for _, value in limits])


def _reader(file: CatalogFile) -> sqlite3.Connection:
    db = file.connect_reader()
    db.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    return db


def _has_seal(table: Table, row: Row, seal: int) -> bool:
    try:
        return table.seal(row) == seal
    except UnicodeError:
        return False


def _fill(
    db: sqlite3.Connection,
    tables: Sequence[Table],
    chain: Chain,
    source: _DamagedCatalog | None,
    vocabularies: Vocabularies,
) -> Rebuilt:
    ledger = None if source is None else source.ledger
    if ledger is not None and ledger.store != chain.store:
        raise database.CatalogDamaged("the catalog is damaged, and the journal is another store's")
    is_exact = chain.is_whole and (ledger is None or ledger.seq <= chain.end)
    reached = 0 if ledger is None else ledger.seq
    db.execute("PRAGMA foreign_keys = OFF")
    db.execute("BEGIN IMMEDIATE")
    filler = Filler(db, tables)
    if is_exact:
        filler.apply_all(chain.changes())
    elif source is None and chain.end > 0:
        filler.apply_all(chain.changes(until=chain.end))
        filler.apply_rooted(chain.changes(after=chain.end))
    elif source is None:
        filler.apply_all(chain.changes())
    else:
        filler.apply_all(chain.changes(until=reached))
        filler.apply_all(source.sound_rows(db))
        filler.apply_all(chain.changes(after=reached))
    filler.set_sequences(chain.sequences)
    seq, total = chain.end, total_of(db, tables)
    lost: tuple[str, ...] = ()
    if not is_exact or dangling(db):
        seq = max(chain.last, reached) + 1
        is_proven = (
            source is not None
            and chain.last <= reached
            and source.has_total(total, schema_seal(db))
        )
        if not is_proven:
            lost = settle(db, vocabularies)
            seal_all(db, tables)
            total = total_of(db, tables)
    write_ledger(db, Ledger(chain.store, seq, total))
    db.execute("COMMIT")
    return Rebuilt(_count(db, "sessions"), _count(db, "turns"), lost, ledger is not None)


def _count(db: sqlite3.Connection, table: str) -> int:
    return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
