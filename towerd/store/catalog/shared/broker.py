"""CatalogBroker: the process that has a store's catalog open, and serves it to others."""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from towerd.errors import ServedAlready, StoreError
from towerd.store.catalog import database
from towerd.store.catalog.catalog import DELETED, Undo
from towerd.store.catalog.identity import TokenizerIdentity
from towerd.store.catalog.journal.tables import TableChange
from towerd.store.catalog.owner import own_store
from towerd.store.catalog.shared.messages import Channel, error_to_wire
from towerd.store.catalog.sqlite import SqliteCatalog
from towerd.store.files import durable

log = logging.getLogger(__name__)

FOLLOWED = frozenset(("segments", "pins", "bases", "files", "cold"))
"""Tables whose rows a process has in memory in part: those of its tokenizer, where they name one."""


@dataclass(frozen=True, slots=True)
class CatalogConnection:
    """A process's connection to the broker."""

    socket: socket.socket
    """The process's end, for `RemoteCatalog`. Close it here once that process has inherited it."""
    blocks_others: Callable[[], bool]
    """Whether the process is at something for which all others wait: it has the turn, or keeps the
    catalog from being maintained. Such moments are short unless it is stopped or hangs."""


class CatalogBroker:
    """The lock and the catalog of one store, for any number of processes. Thread-safe."""

    def __init__(self, root: Path, encrypt: str | None = None) -> None:
        """Lock the store in `root` and open its catalog; created if it is missing. encrypt: as for `Store.open`.
        Raises StoreLocked, StoreVersion, DiskFull, StoreError or ConfigError."""
        with durable.store_errors(f"the store {root} cannot be opened"), ExitStack() as undo:
            owned = own_store(root, time.time, encrypt, undo)
            self._closing = undo.pop_all()
        self.catalog, self.limit = owned.catalog, owned.directory.limit
        self.vault = owned.vault
        """The keys of an encrypted store."""
        self._places = {
            each.name: (
                each.key_at,
                each.columns.index("tokenizer") if "tokenizer" in each.columns else None,
            )
            for each in self.catalog.tables
            if each.name in FOLLOWED
        }
        self.turn = self.catalog.lock
        """Whoever has it may use the catalog: the thread of one client."""
        self._clients: set[BrokerClient] = set()
        self._is_tired = threading.Event()
        self._is_closed = False
        self._resting = threading.Thread(target=self._rest, name="catalog-rest", daemon=True)
        self._resting.start()

    def connect(self) -> CatalogConnection:
        """A new connection, for a process that inherits it."""
        ours, theirs = socket.socketpair()
        client = BrokerClient(self, self.catalog, ours)
        with self.turn:
            self._clients.add(client)
        threading.Thread(target=client.serve, name="catalog-client", daemon=True).start()
        return CatalogConnection(theirs, client.blocks_others)

    def close(self) -> None:
        """End all connections, close the catalog and release the lock."""
        with self.turn:
            clients = list(self._clients)
        for client in clients:
            client.close()
        self._is_closed = True
        self._is_tired.set()
        self._resting.join()
        with self.catalog.paused(), self.turn:
            self._closing.close()

    def changed(self, by: BrokerClient, changes: Sequence[TableChange]) -> None:
        """Note for every other client which rows it has not seen. Called in the turn of `by`."""
        for table, rows, gone in changes:
            places = self._places.get(table)
            if places is None:
                continue
            key_at, tokenizer_at = places
            for client in self.others(by):  # one without a model reads all when it opens one
                unseen: set[Any] = client.unseen[table]
                unseen.update(gone)
                unseen.update(
                    row[key_at]
                    for row in rows
                    if tokenizer_at is None or row[tokenizer_at] == client.tokenizer
                )
                if not unseen:
                    del client.unseen[table]

    def tell(self, by: BrokerClient, deletion: Sequence[Any]) -> None:
        """Note for every other client that a session was deleted. Called in the turn of `by`."""
        tokenizer, scope, id, hashes, at = deletion
        for client in self.others(by):
            client.unseen[DELETED].add((tokenizer, scope, id, tuple(hashes), at))

    def others(self, client: BrokerClient) -> list[BrokerClient]:
        """The other clients that have a model open. Called in a turn."""
        return [each for each in self._clients if each is not client and each.row_identity]

    def leave(self, client: BrokerClient) -> None:
        """Forget a client. Called in its turn."""
        self._clients.discard(client)
        for name in client.names.elements():
            self.catalog.end_file(name)

    def tire(self) -> None:
        """Maintain the catalog soon."""
        self._is_tired.set()

    def _rest(self) -> None:
        while True:
            self._is_tired.wait()
            self._is_tired.clear()
            if self._is_closed:
                return
            self.catalog.rest()


class BrokerClient:
    """One connection. Its thread has the turn from `lock` to `unlock`, in a transaction, and while
    it answers."""

    def __init__(self, broker: CatalogBroker, catalog: SqliteCatalog, sock: socket.socket) -> None:
        self.row_identity = self.tokenizer = 0
        self.unseen: defaultdict[str, set[Any]] = defaultdict(set)
        """Rows that other clients changed, by table, and what they told."""
        self.held: Collection[int] = ()
        self.names = Counter[str]()
        self._broker, self._catalog = broker, catalog
        self._channel = Channel(sock)
        self._n_turns = 0
        self._transaction: AbstractContextManager[Undo] | None = None
        self._failure: Exception | None = None
        self._maintenance = BrokerMaintenance(catalog, broker.tire)
        self._operations: dict[str, Callable[..., Any]] = {
            "path": lambda: os.fspath(catalog.path),
            "lock": self._lock,
            "seen": self.unseen.clear,
            "unlock": self._unlock,
            "open_model": self._open_model,
            "begin": self._begin,
            "commit": self._commit,
            "roll_back": self._roll_back,
            "rows": catalog.rows,
            "sealed": catalog.sealed,
            "run": catalog.run,
            "run_many": catalog.run_many,
            "recovered": lambda: list(catalog.recovered),
            "sizes": catalog.sizes,
            "shrink": catalog.shrink,
            "problems": catalog.problems,
            "journal_problems": catalog.journal_problems,
            "sync_journal": catalog.sync_journal,
            "recognise_lost": lambda *wanted: catalog.recognise_lost(TokenizerIdentity(*wanted)),
            "tell": lambda *deletion: broker.tell(self, deletion),
            "held_elsewhere": lambda: [id for each in broker.others(self) for id in each.held],
            "open_elsewhere": lambda: [each.row_identity for each in broker.others(self)],
            "writing": lambda: list(catalog.writing()),
            "begin_file": self._begin_file,
            "end_file": self._end_file,
        }

    def serve(self) -> None:
        """Answer until the other end closes the connection or dies."""
        try:
            while True:
                operation, *arguments = self._channel.receive()
                if operation == "connect_maintenance":
                    self._channel.send_socket(self._maintenance.theirs)
                    continue
                reply = self._answer(operation, arguments)
                if operation != "unlock":
                    self._channel.send(reply)
        except (EOFError, OSError):
            pass
        finally:
            self._leave()

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    @property
    def is_gone(self) -> bool:
        """Whether its process has closed the connection, or has ended."""
        return self._channel.is_hung_up

    def blocks_others(self) -> bool:
        """See `CatalogConnection`."""
        return self._n_turns > 0 or self._maintenance.is_paused

    def _answer(self, operation: str, arguments: Sequence[Any]) -> Any:
        with self._broker.turn:
            self._catalog.committed = partial(self._broker.changed, self)
            try:
                return [None, self._operations[operation](*arguments)]
            except StoreError as error:
                return error_to_wire(error)
            except sqlite3.Error as error:
                self._failure = error
                return error_to_wire(database.translated(self._catalog.path, error))
            except Exception as error:
                self._failure = error
                log.exception("an operation of the catalog failed")
                return error_to_wire(StoreError(f"the catalog failed: {error}"))

    def _lock(self) -> dict[str, list[Any]]:
        self._take_turn()
        return {table: list(keys) for table, keys in self.unseen.items()}

    def _unlock(self, held: Collection[int] | None) -> None:
        if held is not None:
            self.held = held
        self._give_turn()

    def _open_model(self, row_identity: int, tokenizer: int) -> None:
        for each in self._broker.others(self):
            if each.row_identity == row_identity:
                if not each.is_gone:
                    raise ServedAlready(
                        "This model is served already under another name, with the same settings: "
                        "ask for that one, or unload it first."
                    )
                each.row_identity = 0  # its thread waits for its turn to leave
        self.row_identity, self.tokenizer = row_identity, tokenizer
        self.unseen.clear()

    def _begin(self) -> None:
        assert self._transaction is None
        transaction = self._catalog.transaction()
        transaction.__enter__()
        self._transaction, self._failure = transaction, None
        self._take_turn()

    def _commit(self) -> None:
        transaction, self._transaction = self._transaction, None
        assert transaction is not None
        try:
            transaction.__exit__(None, None, None)
        finally:
            self._give_turn()

    def _roll_back(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            return  # the commit failed, and took its changes back
        error = self._failure or _RolledBack()
        try:
            with suppress(_RolledBack, StoreError, type(error)):
                transaction.__exit__(type(error), error, None)
        finally:
            self._give_turn()

    def _begin_file(self, name: str) -> None:
        self.names[name] += 1
        self._catalog.begin_file(name)

    def _end_file(self, name: str) -> None:
        self.names[name] -= 1
        self.names = +self.names  # without those at 0
        self._catalog.end_file(name)

    def _take_turn(self) -> None:
        self._broker.turn.acquire()
        self._n_turns += 1

    def _give_turn(self) -> None:
        self._n_turns -= 1
        self._broker.turn.release()

    def _leave(self) -> None:
        """Take back what the other end left unfinished."""
        with self._broker.turn:
            self._roll_back()
            self._broker.leave(self)
        while self._n_turns:
            self._give_turn()
        self._maintenance.close()
        self._channel.close()


class BrokerMaintenance:
    """The second connection of a client: maintenance, with a thread of its own, which never has the
    turn.

    A snapshot of the journal takes seconds. Whoever waits for it must not have the turn, and must not
    keep other threads of its process from giving theirs back."""

    def __init__(self, catalog: SqliteCatalog, rest: Callable[[], None]) -> None:
        """rest: makes the broker maintain its catalog soon."""
        ours, self.theirs = socket.socketpair()
        self.is_paused = False
        """Whether the client keeps the catalog from being maintained."""
        self._catalog = catalog
        self._channel = Channel(ours)
        self._pauses = ExitStack()
        self._operations: dict[str, Callable[[], None]] = {
            "pause": self._pause,
            "resume": self._resume,
            "rest": rest,
            "purge": catalog.purge,
            "renew_key": catalog.renew_key,
            "repair": catalog.repair,
        }
        threading.Thread(target=self._serve, name="catalog-upkeep", daemon=True).start()

    def close(self) -> None:
        """End the connection."""
        self.theirs.close()  # if it was not asked for
        self._channel.close()

    def _serve(self) -> None:
        with self._pauses, suppress(EOFError, OSError):
            while True:
                (operation,) = self._channel.receive()
                self._channel.send(self._answer(operation))

    def _answer(self, operation: str) -> list[Any]:
        try:
            self._operations[operation]()
        except StoreError as error:
            return error_to_wire(error)
        except Exception as error:
            log.exception("maintenance of the catalog")
            return error_to_wire(StoreError(f"the catalog failed: {error}"))
        return [None, None]

    def _pause(self) -> None:
        self._pauses.enter_context(self._catalog.paused())
        self.is_paused = True

    def _resume(self) -> None:
        self.is_paused = False
        self._pauses.close()


class _RolledBack(Exception):
    """The client gave its transaction up."""
