"""One catalog for several processes, any of which may be killed: its broker, with threads, sockets and disk drawn."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from house import BusyDisk
from scheduler import Scheduler
from simulated_channels import ChannelOwner, Channels, ProcessDied, channels_on
from simulated_disk import PowerLost
from simulated_sqlite import connections_guarded
from simulated_threads import file_locks_on, threads_on
from simulation import SCOPE, Tokens, edges_on, found_in
from store_tools import ROW_IDENTITY, check_rows, ids_of, make_hot, turn_of
from told import Said, Told

from towerd.errors import NotFound, SegmentsGone, StoreError
from towerd.store import Store
from towerd.store.catalog.shared.broker import CatalogBroker

LIVES = 3
PROCESSES_MAX = 5
"""Of one model, in a life."""
STEPS_MAX = 8
SHARED = "s"
"""The session that every model continues."""


class SharedDisk(BusyDisk):
    """A disk that a process which was killed changes no more."""

    house: BrokerHouse

    def begin(self) -> None:
        """Raises ProcessDied."""
        super().begin()
        self.house.check_alive()

    def change(self, what: str, path: Any, *, needs_room: bool = False) -> None:
        """Raises ProcessDied."""
        self.house.check_alive()
        super().change(what, path, needs_room=needs_room)


class StoreProcess(ChannelOwner):
    """A process with one model, whose store has its catalog in the broker."""

    def __init__(self, house: BrokerHouse, name: str, number: int) -> None:
        self.is_dead = False
        self.is_over = False
        self.name = name
        self.pid = 2 + 3 * number + "abc".index(name)
        self._house = house
        self._rng = random.Random(f"{name} {number} {house.rng.random()}")
        self._own = (f"{name}1", f"{name}2")
        self._unknown: list[Mapping[object, Said]] = []
        """What was asked for and not acknowledged."""

    def run(self) -> None:
        """Until it is killed, or has done all. Raises what it must not be answered with."""
        house = self._house
        connection: Any = house.broker.connect().socket
        connection.owner = self
        store: Store | None = None
        try:
            model = replace(ROW_IDENTITY, model_hash=self.name)
            store = Store.open(
                house.disk.root, model, clock=house.clock, catalog_fd=connection.detach()
            )
            self._found(store)
            for _ in range(self._rng.randint(1, STEPS_MAX)):
                self._step(store)
            store.close()
        except ProcessDied:
            house.operations.append(f"{self.name} is dead")
        except StoreError:
            if house.disk.is_off:
                raise PowerLost from None
            if not self.is_dead:
                raise
        finally:
            self.is_over = True
            if not house.disk.is_off:
                house.channels.close_of(self)
            if self.is_dead and store is not None:
                with suppress(ProcessDied, StoreError):  # only its threads
                    store.close()

    def _step(self, store: Store) -> None:
        step = self._rng.choice(
            [self._turn] * 4
            + [self._write, self._write, self._read, self._read, self._delete, self._rename]
            + [self._flush, self._collect, self._sizes, self._look, self._look]
        )
        self._house.operations.append(f"{self.name} {step.__name__[1:]}")
        step(store)
        if self._house.disk.is_off:
            raise PowerLost
        self._house.operations.append(f"{self.name} {step.__name__[1:]} is done")
        self._house.scheduler.progress()

    @contextmanager
    def _told(self, values: Mapping[object, object]) -> Iterator[None]:
        """What the block does sets these."""
        made = self._house.told.begin(values)
        self._house.unknown[self.name].append(made)
        yield
        if self._house.disk.is_off:
            raise PowerLost
        self._house.check_alive()
        self._house.unknown[self.name].remove(made)
        self._house.told.acknowledge(made)

    def _found(self, store: Store) -> None:
        """What its own sessions are, now that the one before it has left."""
        told, there = self._house.told, {info.id for info in store.sessions()}
        found = {
            ("session", name): tuple(store.session_ids(name).tolist())
            for name in self._own
            if name in there
        }
        for key in (("session", name) for name in self._own):
            allowed = told.allowed(key)
            assert found.get(key) in allowed, f"{key}: found {found.get(key)}, may be {allowed}"
        for made in self._house.unknown[self.name]:
            told.refuse({key: said for key, said in made.items() if key != ("session", SHARED)})
        self._house.unknown[self.name].clear()
        told.acknowledge(told.begin({key: found.get(key) for key in _keys(self._own)}))
        store.check_integrity()

    # ---- what it does ---------------------------------------------------------------------------

    def _tokens(self) -> Tokens:
        return tuple(self._rng.randint(0, 2) for _ in range(self._rng.randint(1, 20)))

    def _known(self, name: str) -> Tokens:
        found = self._house.told.last("session").get(name)
        return found if isinstance(found, tuple) else ()

    def _turn(self, store: Store) -> None:
        name = self._rng.choice((*self._own, SHARED))
        prompt, reply = (*self._known(name), *self._tokens()), self._tokens()
        with self._told({("session", name): prompt + reply}):
            result = store.commit_turn(turn_of(prompt, reply, session=name))
        assert store.match(ids_of(*prompt), SCOPE).n == len(prompt)
        assert result.session_id == name

    def _write(self, store: Store) -> None:
        with store.locked():
            nodes = sorted(store.nodes(), key=lambda node: node.id)
            if not nodes:
                return
            end = self._rng.choice(nodes)
            run = [node for node in end.path() if node.file is None]
            if not run or run != end.path()[-len(run) :]:
                return
            make_hot(store, end)
        with suppress(SegmentsGone):  # another model's process has deleted them meanwhile
            store.rows.write(run)

    def _read(self, store: Store) -> None:
        name = self._rng.choice(self._own)
        known = self._known(name)
        if known:
            assert tuple(store.session_ids(name).tolist()) == known, f"{name} has other tokens"
            assert store.match(ids_of(*known), SCOPE).n >= len(known) - 1
        with store.locked():
            for node in store.nodes():
                check_rows(store, node)

    def _delete(self, store: Store) -> None:
        name = self._rng.choice(self._own)
        if self._known(name):
            with self._told({("session", name): None}):
                store.delete_session(name)

    def _rename(self, store: Store) -> None:
        name = self._rng.choice((*self._own, SHARED))
        with suppress(NotFound):
            store.rename_session(name, f"title {self._rng.randint(0, 9)}")

    def _flush(self, store: Store) -> None:
        store.flush()

    def _look(self, store: Store) -> None:
        """Ask the broker without having the turn."""
        for _ in range(10):
            assert store.state.catalog.rows("SELECT count(*) FROM sessions")[0][0] >= 0

    def _collect(self, store: Store) -> None:
        store.gc()

    def _sizes(self, store: Store) -> None:
        store.check_integrity(keys=True)


class BrokerHouse:
    """The lives of one broker. Each ends with a power cut or a clean stop."""

    kind = "broker"

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(f"broker {seed}")
        self._jumps = random.Random(f"clock {seed}")
        self.seed, self.folder = seed, folder
        self.now = 1e9
        self.told = Told()
        self.unknown: dict[str, list[Mapping[object, Said]]] = {name: [] for name in "abc"}
        """What each model's processes asked for that was not acknowledged."""
        self.operations: list[str] = []
        self.turns: list[str] = []
        """The threads in the order in which they ran."""
        self.processes: dict[str, StoreProcess] = {}

    def clock(self) -> float:
        """Seconds, which may jump either way."""
        self.now += self._jumps.choice((0.0, 1e-3, 1.0, 60.0, -3600.0))
        return self.now

    def pid(self) -> int:
        """The process that runs; 1: the broker's."""
        process = self.processes.get(self.scheduler.running.name)
        return 1 if process is None else process.pid

    def check_alive(self) -> None:
        """Raises ProcessDied in a thread of a process that was killed."""
        process = self.processes.get(self.scheduler.running.name)
        if process is not None and process.is_dead:
            raise ProcessDied

    def run(self, prepare: Callable[[Path], None]) -> None:
        """Live and check. prepare: called with the store's directory. Raises AssertionError, or whatever a thread
        should not raise."""
        root = self.folder / "0"
        root.mkdir()
        prepare(root)
        for life in range(LIVES):
            cut_at = self.rng.choice((None, self.rng.randint(40, 400)))
            rng = random.Random(f"life {life} of {self.seed}")
            self.scheduler = Scheduler(rng)
            self.channels = Channels(self.scheduler, rng)
            self.disk = SharedDisk(root, cut_at, self.scheduler, rng)
            self.disk.house = self
            with (
                threads_on(self.scheduler) as self.pool,
                edges_on(self.disk, rng, self.clock),
                channels_on(self.channels),
                patch.object(os, "getpid", self.pid),
                file_locks_on(self.scheduler),
                connections_guarded(),
            ):
                self._lived()
            self.operations.append(f"life {life} ends: {self.disk.n_changes} changes")
            self.turns += self.scheduler.trace
            root = self.folder / str(life + 1)
            self.disk.after_cut(root, self.rng)

    def _lived(self) -> None:
        """One life; all threads have ended after it."""
        try:
            self._live()
        except PowerLost:
            pass
        except BaseException as error:
            if not (isinstance(error, StoreError) and self.disk.is_off):
                self.scheduler.end(error)
                self._left()
                raise
        self.scheduler.finish()
        self._left()

    def _left(self) -> None:
        """Of a process that is gone there are no descriptors left either."""
        with suppress(AssertionError):
            self.scheduler.finish()
        self.disk.is_off = True
        with suppress(Exception, PowerLost):
            self.broker.close()

    def _live(self) -> None:
        self.broker = CatalogBroker(self.disk.root)
        self._check()
        running = [
            threading.Thread(target=self._follow, args=(name,), name=f"router of {name}")
            for name in "abc"[: self.rng.randint(2, 3)]
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        self._check()
        self.broker.close()
        self.pool.shutdown()
        for left in self.scheduler.alive():  # what ends by itself
            self.scheduler.join(left)

    def _follow(self, name: str) -> None:
        """Start one process of a model after another, and kill some."""
        threads = []
        for number in range(self.rng.randint(1, PROCESSES_MAX)):
            process = StoreProcess(self, name, number)
            self.processes[f"{name}{number}"] = process
            thread = threading.Thread(target=process.run, name=f"{name}{number}")
            threads.append(thread)
            thread.start()
            if self.rng.random() < 0.6:
                for _ in range(self.rng.randint(0, 200)):
                    if process.is_over:
                        break
                    self.scheduler.sleep(self.rng.choice((1e-6, 1e-3)))
            if process.is_over or self.rng.random() < 0.3:
                thread.join()
            else:
                self.operations.append(f"{name} is killed")
                process.is_dead = True
                self.channels.close_of(process)
        for thread in threads:
            thread.join()

    def _check(self) -> None:
        """Everything that was acknowledged is there, when all have left."""
        connection: Any = self.broker.connect().socket
        with Store.open(
            self.disk.root, ROW_IDENTITY, clock=self.clock, catalog_fd=connection.detach()
        ) as store:
            found: dict[object, object] = {
                key: value
                for key, value in found_in(store).each().items()
                if isinstance(key, tuple) and key[0] == "session"
            }
            wrong = self.told.wrong(found)
            assert not wrong, "\n".join(wrong)
            self.told.settle(found)
            for each in self.unknown.values():
                each.clear()
            for node in store.nodes():
                check_rows(store, node)
            problems = store.verify().problems
            assert not problems, problems
            store.check_integrity(keys=True)


def _keys(names: tuple[str, ...]) -> list[tuple[str, str]]:
    return [("session", name) for name in names]
