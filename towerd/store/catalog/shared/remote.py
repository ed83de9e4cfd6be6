"""RemoteCatalog: the catalog of a store that another process has open."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from towerd.store.catalog.catalog import Catalog, Changed, EnteredIdentity, Lock, Names, Upkeep
from towerd.store.catalog.identity import TokenizerIdentity
from towerd.store.catalog.shared.maintenance import RemoteUpkeep
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
        self._upkeep = self._connect_upkeep()
        self.writing: Names = RemoteNames(self._call)

    def close(self) -> None:
        """End the connection; the broker then has the lock back."""
        with self._calling:
            self._is_closed = True
            self._upkeep.close()
            self._channel.close()

    def _connect_upkeep(self) -> RemoteUpkeep:
        try:
            self._channel.send(["connect_upkeep"])
            return RemoteUpkeep(self._channel.receive_socket())
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

    def bytes_on_disk(self) -> int:
        return int(self._call("bytes_on_disk"))

    def journal_bytes(self) -> int:
        return int(self._call("journal_bytes"))

    def shrink(self) -> None:
        self._call("shrink")

    def problems(self) -> list[str]:
        found: list[str] = self._call("problems")
        return found

    def journal_problems(self) -> list[str]:
        found: list[str] = self._call("journal_problems")
        return found

    def upkeep(self, lock: Callable[[], AbstractContextManager[None]]) -> Upkeep:
        return self._upkeep

    # --- other processes ------------------------------------------------------------------

    def new_lock(self) -> Lock:
        return SharedLock(self._take, self._let_go)

    def open_model(self, of: EnteredIdentity) -> None:
        self._call("open_model", of.fingerprint, of.tokenizer)

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

    def _recognise_lost(self, wanted: TokenizerIdentity) -> int | None:
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


class RemoteNames(Names):
    """The names of files that are being written, which the broker keeps."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def add(self, name: str, /) -> None:
        self._call("add_name", name)

    def discard(self, name: str, /) -> None:
        self._call("discard_name", name)

    def __contains__(self, name: object) -> bool:
        return name in self._call("names")

    def __iter__(self) -> Iterator[str]:
        yield from self._call("names")

    def __len__(self) -> int:
        return len(self._call("names"))


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
