"""The second connection of a catalog's client: maintenance, which may wait while the first works.

A snapshot of the journal takes seconds. Whoever waits for it must not have the turn, and must not
keep other threads of its process from giving theirs back.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from towerd.errors import StoreError
from towerd.store.catalog.catalog import Upkeep
from towerd.store.catalog.shared.messages import Channel, error_to_wire, result_of

log = logging.getLogger(__name__)


class BrokerMaintenance:
    """The broker's end, with a thread of its own, which never has the turn."""

    def __init__(self, upkeep: Upkeep, rest: Callable[[], None]) -> None:
        """rest: makes the broker maintain its catalog soon."""
        ours, self.theirs = socket.socketpair()
        self.is_paused = False
        """Whether the client keeps the catalog from being maintained."""
        self._upkeep = upkeep
        self._channel = Channel(ours)
        self._pauses = ExitStack()
        self._operations: dict[str, Callable[[], None]] = {
            "pause": self._pause,
            "resume": self._resume,
            "rest": rest,
            "purge": upkeep.purge,
            "repair": upkeep.repair,
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
        self._pauses.enter_context(self._upkeep.paused())
        self.is_paused = True

    def _resume(self) -> None:
        self.is_paused = False
        self._pauses.close()


class RemoteUpkeep(Upkeep):
    """The client's end: the broker maintains its catalog, and this asks it to. Thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._channel = Channel(sock)
        self._calling = threading.Lock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._calling:
            self._call("pause")
            try:
                yield
            finally:
                with suppress(StoreError):  # a closed connection pauses nothing
                    self._call("resume")

    def rest(self) -> None:
        with self._calling:
            self._call("rest")

    def purge(self) -> None:
        with self._calling:
            self._call("purge")

    def repair(self) -> None:
        with self._calling:
            self._call("repair")

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _call(self, operation: str) -> None:
        result_of(self._channel, operation)
