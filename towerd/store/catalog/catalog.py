"""Catalog: what the store keeps in SQLite, as its one interface; in this process or behind a broker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from towerd.errors import DiskFull, StoreError
from towerd.slots.errors import StateError
from towerd.slots.row_identity import RowIdentity
from towerd.store.catalog import database
from towerd.store.catalog.identity import ModelIdentity, TokenizerIdentity
from towerd.store.catalog.lost_tokenizers import UNKNOWN

Undo: TypeAlias = list[Callable[[], None]]
Lock: TypeAlias = AbstractContextManager[object]
"""A reentrant lock."""
Changed: TypeAlias = Mapping[str, Collection[Any]]
"""Table -> the keys of its rows that other processes entered, changed or deleted; DELETED -> what
they told of sessions that they deleted."""
DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class KnownRowIdentity:
    """A row identity known to the store. `opened` is the Unix time it was last opened."""

    pk: int
    row_identity: RowIdentity
    opened: float


@dataclass(frozen=True, slots=True)
class EnteredIdentity:
    """The row ids of a model's row identity and of its tokenizer, and the tokenizer's digest."""

    row_identity: int
    tokenizer: int
    tokenizer_digest: bytes


class Catalog(ABC):
    """The rows of a store and their durable transactions. Not thread-safe: the store's lock guards
    it, unless a method says otherwise."""

    path: Path
    lock: Lock
    """The lock of a store with this catalog. It excludes other threads and, if the catalog is
    shared, other processes."""
    is_shared = False
    """Whether other processes change it, too."""

    # --- using it -------------------------------------------------------------------------

    @abstractmethod
    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query."""

    @abstractmethod
    def sealed(self, table: str, where: str, params: Sequence[Any]) -> list[dict[str, Any]]:
        """Complete rows of a table by column, each checked against its seal. Use it for data
        that is served."""

    @abstractmethod
    def run(self, sql: str, params: Sequence[Any] = ()) -> int:
        """Run one statement inside a transaction. Returns the row id of an INSERT; otherwise
        the result is meaningless."""

    def insert(self, table: str, **values: Any) -> int:
        """Insert a row, inside a transaction; returns its id."""
        columns, marks = ", ".join(values), ", ".join("?" * len(values))
        return self.run(f"INSERT INTO {table}({columns}) VALUES ({marks})", tuple(values.values()))

    @abstractmethod
    def run_many(self, sql: str, params: Sequence[Sequence[Any]]) -> None:
        """One statement for many parameter sets, inside a transaction."""

    @contextmanager
    def transaction(self) -> Iterator[Undo]:
        """Durable when the block ends without an error. The block appends undo functions for
        its changes in memory to the list; on any error these run and the database rolls back."""
        undo: Undo = []
        with self._errors():
            self._begin()
            try:
                yield undo
                self._commit()
            except BaseException as error:
                for step in reversed(undo):
                    step()
                self._roll_back(error)
                raise

    def get_meta(self, key: str) -> str | None:
        """A small value kept for other modules (the model hash cache, for example)."""
        rows = self.sealed("meta", "key = ?", (key,))
        return str(rows[0]["value"]) if rows else None

    def set_meta(self, key: str, value: str) -> None:
        """Durable when it returns."""
        with self.transaction():
            self.run("INSERT OR REPLACE INTO meta(key, value) VALUES (?, ?)", (key, value))

    def row_identities(self) -> list[KnownRowIdentity]:
        """Every row identity in the store, most recently opened first."""
        found = []
        for row in self.sealed("fingerprints", "true ORDER BY opened DESC, id DESC", ()):
            try:
                row_identity = RowIdentity.from_json(msgspec.json.decode(row["json"]))
                found.append(KnownRowIdentity(row["id"], row_identity, row["opened"]))
            except (StateError, msgspec.DecodeError) as error:
                raise self.damaged(f"row identity {row['id']}: {error}") from error
        return found

    def enter(self, identity: ModelIdentity, now: float) -> EnteredIdentity:
        """The keys of a model's row identity and tokenizer, which are entered if they are new."""
        digest = identity.row_identity.digest()
        text = msgspec.json.encode(identity.row_identity.to_json()).decode()
        known = self.rows("SELECT id, tokenizer FROM fingerprints WHERE digest = ?", (digest,))
        tokenizer = known[0][1] if known else None
        if tokenizer is None or self.tokenizer(tokenizer).pieces == UNKNOWN:
            tokenizer = self._tokenizer_of(identity.tokenizer)
        # A known row identity can be opened on a full disk, so that data can be evicted.
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

    @abstractmethod
    def recognise_lost(self, wanted: TokenizerIdentity) -> int | None:
        """The tokenizer of a row that was lost, if it proves to be this one; it is then known."""

    def _tokenizer_of(self, wanted: TokenizerIdentity) -> int | None:
        """The tokenizer that is the wanted one as far as both are known."""
        for id, rules in self.rows(
            "SELECT id, rules FROM tokenizers WHERE pieces = ? OR digest = ?"
            " ORDER BY rules IS NULL, opened DESC",
            (wanted.pieces, wanted.digest()),
        ):
            if wanted.rules is None or rules in (None, wanted.rules):
                return int(id)
        return self.recognise_lost(wanted)

    def _enter_tokenizer(self, tokenizer: TokenizerIdentity, now: float) -> int:
        digest, pieces, rules = tokenizer.digest(), tokenizer.pieces, tokenizer.rules
        return self.insert(
            "tokenizers", digest=digest, pieces=pieces, rules=rules, created=now, opened=now
        )

    def damaged(self, what: str) -> StoreError:
        """The error for corrupt content."""
        return database.damaged(self.path, what)

    # --- looking after it -----------------------------------------------------------------

    @property
    @abstractmethod
    def recovered(self) -> Sequence[str]:
        """What was recovered at opening and since, in sentences."""

    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Bytes of the database with its WAL, and of the journal."""

    @abstractmethod
    def shrink(self) -> None:
        """Return unused pages to the file system if they make up most of a large database.
        Without room for the copy that this needs, the pages remain available for reuse."""

    @abstractmethod
    def problems(self) -> list[str]:
        """Problems of the database; empty if there are none. Reads all of it."""

    @abstractmethod
    def journal_problems(self) -> list[str]:
        """Damaged or missing parts of the journal; empty if there are none."""

    @abstractmethod
    def sync_journal(self) -> None:
        """Make the journal durable up to the last transaction. Raises DiskFull or StoreError, also if it
        lacks a change until it is written again."""

    # Maintenance is called by any thread that does not hold the lock.

    @abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """No snapshot of the journal is written inside the block. Taken before the lock."""

    @abstractmethod
    def rest(self) -> None:
        """Idle maintenance: rebuild a damaged database, checkpoint the WAL, sync the journal,
        and rewrite it if it has grown or is incomplete. Failures are logged."""

    @abstractmethod
    def purge(self) -> None:
        """Rewrite the journal and empty the WAL, so that no file retains deleted data.
        Failures are logged."""

    @abstractmethod
    def renew_key(self) -> None:
        """Encrypt the database and its journal with the vault's key in use, so that no file needs an earlier one; the
        process that has the catalog open has begun to renew its vault. Killed or failed, the next call continues.
        Raises CatalogDamaged, DiskFull or StoreError."""

    @abstractmethod
    def repair(self) -> None:
        """Rebuild a damaged database from the journal, or rewrite a damaged journal from the
        database. Raises CatalogDamaged if both are damaged, DiskFull or StoreError."""

    @abstractmethod
    def close(self) -> None:
        """Close the catalog. Raises StoreError."""

    # --- other processes ------------------------------------------------------------------

    @abstractmethod
    def writing(self) -> Collection[str]:
        """The files that any process of this store is writing, which are not in the catalog yet.
        From any thread."""

    @abstractmethod
    def begin_file(self, name: str) -> None:
        """Add a name to `writing`, as often as it is begun. From any thread."""

    @abstractmethod
    def end_file(self, name: str) -> None:
        """Remove a name from `writing`, once it has ended as often as it was begun. From any thread."""

    @contextmanager
    def being_written(self, name: str) -> Iterator[None]:
        """The file of this name is being written inside the block."""
        self.begin_file(name)
        try:
            yield
        finally:
            self.end_file(name)

    def open_model(self, of: EnteredIdentity) -> None:  # noqa: B027
        """Tell other processes that this one serves a model. Called under the lock, which it keeps
        until `follow`. Raises StoreLocked if another process serves it."""

    def follow(  # noqa: B027
        self, changed: Callable[[Changed], None], held: Callable[[], Collection[int]]
    ) -> None:
        """Call `changed`, each time that the lock is taken, with what other processes changed since
        it was last held; `held`, before it is released, for the segments that running requests end
        in."""

    def tell(self, deletion: Sequence[Any]) -> None:  # noqa: B027
        """Tell other processes that a session was deleted, before the lock is released."""

    def held_elsewhere(self) -> Collection[int]:
        """The segments that running requests of other processes end in."""
        return ()

    def open_elsewhere(self) -> Collection[int]:
        """The row ids of the row identities that other processes have open."""
        return ()

    # --- inside ---------------------------------------------------------------------------

    @abstractmethod
    def _begin(self) -> None:
        """Begin a transaction."""

    @abstractmethod
    def _commit(self) -> None:
        """Make the transaction durable and end it."""

    @abstractmethod
    def _roll_back(self, error: BaseException) -> None:
        """End the transaction, if it has not ended, without its changes."""

    def _errors(self) -> AbstractContextManager[None]:
        """Turns errors of the database into StoreError."""
        return nullcontext()


def latest_row_identity(catalog: Catalog) -> RowIdentity:
    """The most recently opened row identity, for tools that have no model loaded.

    Raises StoreError for an empty store."""
    known = catalog.row_identities()
    if not known:
        raise StoreError(f"the store {catalog.path.parent} is empty: nothing was served from it")
    return known[0].row_identity
