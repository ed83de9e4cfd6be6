"""The catalog: one SQLite connection, durable transactions, and the journal that follows them."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from towerd.errors import DiskFull, StoreError
from towerd.slots.errors import StateError
from towerd.slots.fingerprint import Fingerprint
from towerd.store.catalog import database, lost_tokenizers
from towerd.store.catalog.database import CatalogDamaged
from towerd.store.catalog.identity import ModelIdentity, TokenizerIdentity
from towerd.store.catalog.journal.changes import ChangeRecorder, TableChange
from towerd.store.catalog.journal.clean import mark_clean
from towerd.store.catalog.journal.examine import problems_of, select
from towerd.store.catalog.journal.recover import open_catalog, rebuild_catalog
from towerd.store.catalog.journal.settle import drop_wrong
from towerd.store.catalog.journal.tables import read_ledger, write_ledger
from towerd.store.catalog.lost_tokenizers import UNKNOWN
from towerd.store.segments.durable import store_errors

log = logging.getLogger(__name__)

Undo: TypeAlias = list[Callable[[], None]]
_T = TypeVar("_T")

SHRINK_BYTES_MIN = 4 << 20
"""Smaller savings are not worth a copy of the database."""


@dataclass(frozen=True, slots=True)
class KnownFingerprint:
    """A fingerprint known to the store. `opened` is the Unix time it was last opened."""

    pk: int
    fingerprint: Fingerprint
    opened: float


@dataclass(frozen=True, slots=True)
class EnteredIdentity:
    """The row ids of a model's fingerprint and of its tokenizer, and the tokenizer's digest."""

    fingerprint: int
    tokenizer: int
    tokenizer_digest: bytes


class Catalog:
    """The database file and its journal. Not thread-safe; the store's lock guards it."""

    def __init__(self, path: Path) -> None:
        """Open or create the catalog; `open_catalog` describes recovery. Raises StoreError,
        StoreVersion, DiskFull or OSError."""
        self.path = path
        with self._errors():
            opened = open_catalog(path)
        self.journal, self.tables = opened.journal, opened.tables
        self._ledger = opened.ledger
        self._use(opened.db)
        self._is_flushed = False
        self.is_doubtful = False
        """The database is damaged and could not be rebuilt at once."""
        self.recovered = list(opened.notes)
        """What was recovered at opening and since, in sentences."""

    def close(self) -> None:
        """Fold the WAL into the database and close both."""
        with self._errors():
            with suppress(OSError):
                self.journal.sync()
            self.journal.close()
            self._db.close()
        if not self.is_doubtful:
            mark_clean(self.path)

    # --- using it -------------------------------------------------------------------------

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        return self._healed(lambda: self._db.execute(sql, params).fetchall())

    def sealed(self, table: str, where: str, params: Sequence[Any]) -> list[dict[str, Any]]:
        """Complete rows of a table by column, each checked against its seal. Use it for data
        that is served."""
        kind = next(each for each in self.tables if each.name == table)

        def read() -> list[dict[str, Any]]:
            found = self._db.execute(select(kind, f"WHERE {where}"), params).fetchall()
            for *row, seal in found:
                if kind.seal(row) != seal:
                    raise CatalogDamaged(f"wrong checksum in {table}, row {row[kind.key_at]!r}")
            return [dict(zip(kind.columns, row, strict=False)) for row in found]

        return self._healed(read)

    def run(self, sql: str, params: Sequence[Any] = ()) -> int:
        """Run one statement inside a transaction. Returns the row id of an INSERT; otherwise
        the result is meaningless."""
        assert self._db.in_transaction
        return self._db.execute(sql, params).lastrowid or 0

    def run_many(self, sql: str, params: Sequence[Sequence[Any]]) -> None:
        """One statement for many parameter sets, inside a transaction."""
        assert self._db.in_transaction
        self._db.executemany(sql, params)

    @contextmanager
    def transaction(self) -> Iterator[Undo]:
        """Durable when the block ends without an error. The block appends undo functions for
        its changes in memory to the list; on any error these run and the database rolls back."""
        undo: Undo = []
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            self._is_flushed = False
            try:
                yield undo
                self._commit()
            except BaseException as error:
                self.is_doubtful |= isinstance(error, sqlite3.Error) and database.is_damage(error)
                for step in reversed(undo):
                    step()
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                self._watch.clear()

    def get_meta(self, key: str) -> str | None:
        """A small value kept for other modules (the model hash cache, for example)."""
        rows = self.sealed("meta", "key = ?", (key,))
        return str(rows[0]["value"]) if rows else None

    def set_meta(self, key: str, value: str) -> None:
        """Durable when it returns."""
        with self.transaction():
            self.run("INSERT OR REPLACE INTO meta(key, value) VALUES (?, ?)", (key, value))

    def fingerprints(self) -> list[KnownFingerprint]:
        """Every fingerprint in the store, most recently opened first."""
        found = []
        for row in self.sealed("fingerprints", "true ORDER BY opened DESC, id DESC", ()):
            try:
                fingerprint = Fingerprint.from_json(msgspec.json.decode(row["json"]))
                found.append(KnownFingerprint(row["id"], fingerprint, row["opened"]))
            except (StateError, msgspec.DecodeError) as error:
                raise self.damaged(f"fingerprint {row['id']}: {error}") from error
        return found

    def enter(self, identity: ModelIdentity, now: float) -> EnteredIdentity:
        """The keys of a model's fingerprint and tokenizer, which are entered if they are new."""
        digest = identity.fingerprint.digest()
        text = msgspec.json.encode(identity.fingerprint.to_json()).decode()
        known = self.rows("SELECT id, tokenizer FROM fingerprints WHERE digest = ?", (digest,))
        tokenizer = known[0][1] if known else None
        if tokenizer is None or self.tokenizer(tokenizer).pieces == UNKNOWN:
            tokenizer = self._tokenizer_of(identity.tokenizer)
        # A known fingerprint can be opened on a full disk, so that data can be evicted.
        is_known = tokenizer is not None and bool(known)
        with suppress(DiskFull) if is_known else nullcontext(), self.transaction():
            if tokenizer is None:
                tokenizer = self._enter_tokenizer(identity.tokenizer, now)
            self.run(
                "UPDATE tokenizers SET opened = ?, rules = coalesce(rules, ?) WHERE id = ?",
                (now, identity.rules, tokenizer),
            )
            pk = self.run(
                "INSERT INTO fingerprints(digest, json, created, opened, tokenizer)"
                " VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (digest) DO UPDATE SET opened = excluded.opened,"
                " tokenizer = excluded.tokenizer",
                (digest, text, now, now, tokenizer),
            )
        ((tokenizer_digest,),) = self.rows(
            "SELECT digest FROM tokenizers WHERE id = ?", (tokenizer,)
        )
        return EnteredIdentity(known[0][0] if known else pk, tokenizer, tokenizer_digest)

    def enter_tokenizer(self, wanted: TokenizerIdentity, now: float) -> int:
        """The key of a tokenizer that need not be a model's here; it is entered if it is new."""
        known = self._tokenizer_of(wanted)
        if known is not None:
            return known
        with self.transaction():
            return self._enter_tokenizer(wanted, now)

    def tokenizer(self, pk: int) -> TokenizerIdentity:
        """The identity of an entered tokenizer."""
        ((pieces, rules),) = self.rows("SELECT pieces, rules FROM tokenizers WHERE id = ?", (pk,))
        return TokenizerIdentity(pieces, rules)

    def _tokenizer_of(self, wanted: TokenizerIdentity) -> int | None:
        """The tokenizer that is the wanted one as far as both are known."""
        for id, rules in self.rows(
            "SELECT id, rules FROM tokenizers WHERE pieces = ? OR digest = ?"
            " ORDER BY rules IS NULL, opened DESC",
            (wanted.pieces, wanted.digest()),
        ):
            if wanted.rules is None or rules in (None, wanted.rules):
                return int(id)
        return self._unknown_tokenizer(wanted)

    def _unknown_tokenizer(self, wanted: TokenizerIdentity) -> int | None:
        """The tokenizer of a row that was lost, if it proves to be this one; it is then known."""
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
        return pk

    def _enter_tokenizer(self, tokenizer: TokenizerIdentity, now: float) -> int:
        return self.run(
            "INSERT INTO tokenizers(digest, pieces, rules, created, opened) VALUES (?, ?, ?, ?, ?)",
            (tokenizer.digest(), tokenizer.pieces, tokenizer.rules, now, now),
        )

    def damaged(self, what: str) -> StoreError:
        """The error for corrupt content."""
        return database.damaged(self.path, what)

    # --- looking after it -----------------------------------------------------------------

    def bytes_on_disk(self) -> int:
        """Size of the database and its WAL."""
        paths = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(path.stat().st_size for path in paths if path.exists())

    def shrink(self) -> None:
        """Return unused pages to the file system if they make up most of a large database.
        Without room for the copy that this needs, the pages remain available for reuse."""
        pragmas = ("page_size", "page_count", "freelist_count")
        size, n, n_free = (int(self.rows(f"PRAGMA {name}")[0][0]) for name in pragmas)
        if n_free * size < SHRINK_BYTES_MIN or n_free < n // 2:
            return
        with suppress(DiskFull):
            self.rows("VACUUM")
            self.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def problems(self) -> list[str]:
        """Problems of the database; empty if there are none. Reads all of it."""
        found = problems_of(self._db, self.tables)
        if not found and read_ledger(self._db) != self._ledger:
            found.append("catalog: it is in another state than it was left in")
        return found

    def journal_problems(self) -> list[str]:
        """Damaged or missing parts of the journal; empty if there are none."""
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

    def flush(self, *, truncate: bool = False) -> None:
        """Checkpoint the WAL into the database and sync the journal. Meant for idle moments.
        `truncate` empties the WAL. Raises StoreError."""
        if self._is_flushed and not truncate:
            return
        with self._errors():
            self._db.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if truncate else 'PASSIVE'})")
        with store_errors("the journal cannot be synced"):
            self.journal.sync()
        self._is_flushed = True

    def heal(self, why: str) -> None:
        """Replace the damaged database with one rebuilt from the journal. Raises
        CatalogDamaged if the journal does not have exactly this state; the next start then
        recovers what the journal has."""
        assert not self._db.in_transaction
        chain = self.journal.read()
        if not chain.is_whole or (chain.store, chain.end) != (self._ledger.store, self._ledger.seq):
            raise database.damaged_in_use(self.path, why)
        with suppress(sqlite3.Error):
            self._db.close()
        try:
            with self._errors(), store_errors("the catalog cannot be rebuilt"):
                self.recovered.append(rebuild_catalog(self.path, self.journal, why))
            self.is_doubtful = False
        finally:
            with self._errors():
                db = database.connect(self.path)
                database.configure(db)
                self._use(db)

    # --- inside ---------------------------------------------------------------------------

    def _use(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._watch = ChangeRecorder(db, self.tables)

    def _commit(self) -> None:
        """End the transaction. Its changes reach the journal before the database: a kill in
        between leaves the journal ahead, and the next start replays it."""
        changes = self._watch.changes()
        if not changes:
            self._db.execute("COMMIT")
            return
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
        try:
            self.journal.append(seq, changes)
        except OSError as error:
            if not self.journal.is_behind:
                log.error("the journal cannot be written", extra={"error": str(error)})
            self.journal.is_behind = True
            return False
        return True

    def _healed(self, read: Callable[[], list[_T]]) -> list[_T]:
        """Return the result of `read`; rebuild the database first if it is damaged."""
        try:
            return read()
        except (sqlite3.Error, CatalogDamaged, UnicodeError) as error:
            if isinstance(error, sqlite3.Error) and not database.is_damage(error):
                raise database.translated(self.path, error) from error
            self.is_doubtful = True
            if self._db.in_transaction:
                raise database.damaged_in_use(self.path, str(error)) from error
            self.heal(str(error))
        with self._errors():
            return read()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with database.errors(self.path):
            yield


def latest_fingerprint(catalog: Catalog) -> Fingerprint:
    """The most recently opened fingerprint, for tools that have no model loaded.

    Raises StoreError for an empty store."""
    known = catalog.fingerprints()
    if not known:
        raise StoreError(f"the store {catalog.path.parent} is empty: nothing was served from it")
    return known[0].fingerprint
