"""RemoteCatalog: the catalog of a store that another process has open."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from towerd.errors import StoreError
from towerd.store.catalog.catalog import Catalog, Changed, EnteredIdentity
from towerd.store.catalog.identity import TokenizerIdentity
from towerd.store.catalog.shared.messages import Channel, broker_gone, result_of


class RemoteCatalog(Catalog):
    """Every operation is one message to the broker, which runs it while no other process has the
    lock. When the broker is gone every operation raises StoreError."""

    is_shared = True

    def __init__(self, fd: int) -> None:
        """fd: a socket from `CatalogBroker.connect`, which this object then owns."""
        self._channel = Channel(socket.socket(fileno=fd))
        self._calling = threading.Lock()
        """Names of written files are told without the store's lock."""
        self._in_transaction = False
        self._is_closed = False
        self._changed: Callable[[Changed], None] | None = None
        self._held: Callable[[], Collection[int]] = tuple
        self._told: Collection[int] = ()
        """The segments that the broker knows to be held."""
        self.path = Path(self._call("path"))
        self.lock = SharedLock(self._take, self._let_go)
        self._maintenance = self._connect_maintenance()
        """The second connection, for operations that may wait while the first one works."""
        self._maintaining = threading.Lock()

    def close(self) -> None:
        """End the connection; the broker then has the lock back."""
        with self._calling:
            self._is_closed = True
            self._maintenance.close()
            self._channel.close()

    def _connect_maintenance(self) -> Channel:
        try:
            self._channel.send(["connect_maintenance"])
            return Channel(self._channel.receive_socket())
        except (EOFError, OSError) as error:
            raise broker_gone() from error

    # --- using it -------------------------------------------------------------------------

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._call("rows", sql, params)]

    def sealed(self, table: str, where: str, params: Sequence[Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._call("sealed", table, where, params)
        return found

    def run(self, sql: str, params: Sequence[Any] = ()) -> int:
        assert self._in_transaction
        return int(self._call("run", sql, params))

    def run_many(self, sql: str, params: Sequence[Sequence[Any]]) -> None:
        assert self._in_transaction
        self._call("run_many", sql, params)

    # --- looking after it -----------------------------------------------------------------

    @property
    def recovered(self) -> Sequence[str]:
        found: list[str] = self._call("recovered")
        return found

    def sizes(self) -> tuple[int, int]:
        of_catalog, of_journal = self._call("sizes")
        return of_catalog, of_journal

    def shrink(self) -> None:
        self._call("shrink")

    def problems(self) -> list[str]:
        found: list[str] = self._call("problems")
        return found

    def journal_problems(self) -> list[str]:
        found: list[str] = self._call("journal_problems")
        return found

    def sync_journal(self) -> None:
        self._call("sync_journal")

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._maintaining:
            result_of(self._maintenance, "pause")
            try:
                yield
            finally:
                with suppress(StoreError):  # a closed connection pauses nothing
                    result_of(self._maintenance, "resume")

    def rest(self) -> None:
        self._maintain("rest")

    def purge(self) -> None:
        self._maintain("purge")

    def renew_key(self) -> None:
        self._maintain("renew_key")

    def repair(self) -> None:
        self._maintain("repair")

    def _maintain(self, operation: str) -> None:
        with self._maintaining:
            result_of(self._maintenance, operation)

    # --- other processes ------------------------------------------------------------------

    def writing(self) -> Collection[str]:
        return frozenset(self._call("writing"))

    def begin_file(self, name: str) -> None:
        self._call("begin_file", name)

    def end_file(self, name: str) -> None:
        self._call("end_file", name)

    def open_model(self, of: EnteredIdentity) -> None:
        self._call("open_model", of.row_identity, of.tokenizer)

    def follow(
        self, changed: Callable[[Changed], None], held: Callable[[], Collection[int]]
    ) -> None:
        self._changed, self._held = changed, held

    def tell(self, deletion: Sequence[Any]) -> None:
        self._call("tell", *deletion)

    def held_elsewhere(self) -> Collection[int]:
        return frozenset(self._call("held_elsewhere"))

    def open_elsewhere(self) -> Collection[int]:
        return frozenset(self._call("open_elsewhere"))

    # --- inside ---------------------------------------------------------------------------

    def recognise_lost(self, wanted: TokenizerIdentity) -> int | None:
        found: int | None = self._call("recognise_lost", wanted.pieces, wanted.rules)
        return found

    def _begin(self) -> None:
        self._call("begin")
        self._in_transaction = True

    def _commit(self) -> None:
        self._call("commit")
        self._in_transaction = False

    def _roll_back(self, error: BaseException) -> None:
        if self._in_transaction:
            self._in_transaction = False
            self._call("roll_back")

    def _take(self) -> None:
        changed = self._call("lock")
        if not changed:
            return
        assert self._changed is not None
        try:
            self._changed(changed)
            self._call("seen")  # else the next one that takes the lock is told again
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        held = self._held()
        news = None if held == self._told else list(held)
        self._told = held
        with self._calling:
            if self._is_closed:
                return
            try:
                self._channel.send(["unlock", news])
            except OSError as error:
                raise broker_gone() from error

    def _call(self, *message: Any) -> Any:
        with self._calling:
            return result_of(self._channel, *message)


class SharedLock:
    """A reentrant lock between the threads of this process and between processes."""

    def __init__(self, take: Callable[[], None], let_go: Callable[[], None]) -> None:
        """take, let_go: called by the thread that has the lock when it first takes it, and when it
        last lets go of it."""
        self._threads = threading.RLock()
        self._take, self._let_go = take, let_go
        self._depth = 0

    def __enter__(self) -> SharedLock:
        self._threads.acquire()
        self._depth += 1
        if self._depth == 1:
            try:
                self._take()
            except BaseException:
                self._depth = 0
                self._threads.release()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1:
                self._let_go()
        finally:
            self._depth -= 1
            self._threads.release()
