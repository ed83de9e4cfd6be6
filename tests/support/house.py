"""A store, its tiers and its recorder under several clients at once, on a simulated disk, clock and scheduler."""

from __future__ import annotations

import logging
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from encrypted_stores import encrypt
from house_client import CROWDED, KINDS, N_KINDS, NO_LIMIT, Client
from house_foreign import Words, foreign_in
from house_tenants import GUEST, check_apart, forget_guest
from house_watch import LostRows, Marks, pins_watched
from scheduler import Scheduler, ThreadDied
from simulated_disk import PowerLost, SimulatedDisk
from simulated_sqlite import connections_guarded
from simulated_threads import file_locks_on, threads_on
from simulation import SCOPE, Tokens, codec, edges_on, found_in
from store_tools import LAYOUT, ROW_IDENTITY, check_rows
from told import Made, Told

from towerd.errors import StoreError
from towerd.policy import NAMES
from towerd.sessions.recorder import TurnRecorder
from towerd.sessions.traffic import Traffic
from towerd.store import Store
from towerd.store.encryption.page_cipher import libcrypto
from towerd.tiers.checkpoint_tier import CheckpointTier, close_tiers
from towerd.tiers.formats.fidelity import LevelFormats
from towerd.tiers.manager import Tiers

LIVES = 3
GUESTS_SHARE = 0.4
"""Of the lives in which two of the clients are of another tenant."""
ENCRYPTED_SHARE = 0.2
"""Of the stores."""
_WARM_BYTES = (40_000, 120_000, NO_LIMIT)
_HOT_BYTES = (20_000, 60_000, NO_LIMIT)
_FORMATS = ("q4h", "q6", "q8")
_SLOW_S = (1e-3, 0.1, 40.0)


class BusyDisk(SimulatedDisk):
    """A disk that several threads use, slow now and then; a power cut ends all of them."""

    def __init__(
        self, root: Path, cut_at: int | None, scheduler: Scheduler, rng: random.Random
    ) -> None:
        super().__init__(root, cut_at)
        self._scheduler, self._rng = scheduler, rng
        self._slow = rng.choice((0.0, 0.02, 0.2))
        self.n_refused = 0
        """How much room was refused so far."""
        self.full_left = 0
        """It is full for so many changes that need room."""

    def begin(self) -> None:
        """Others may run meanwhile. Raises PowerLost."""
        if self._rng.random() < self._slow:
            self._scheduler.block(self._rng.choice(_SLOW_S))
        else:
            self._scheduler.point()

    def change(self, what: str, path: Any, *, needs_room: bool = False) -> None:
        """See SimulatedDisk.change."""
        if needs_room:
            self.is_full = self.full_left > 0
            self.full_left = max(0, self.full_left - 1)
            self.n_refused += self.is_full
        try:
            super().change(f"{what}, {self._scheduler.running.name}:", path, needs_room=needs_room)
        except PowerLost as lost:
            self._scheduler.end(lost)
            raise


class Complaints(logging.Handler):
    """What towerd says of errors, which is a failure unless a full or lost disk explains it."""

    def __init__(self, house: House) -> None:
        super().__init__(logging.ERROR)
        self._house = house

    def emit(self, record: logging.LogRecord) -> None:
        """End the life."""
        house = self._house
        if not house.disk.is_off and (record.exc_info or not house.disk.n_refused):
            self.setFormatter(logging.Formatter("%(message)s %(error)s", defaults={"error": ""}))
            house.scheduler.end(ThreadDied(f"towerd says: {self.format(record)}"))


@contextmanager
def heard_by(handler: logging.Handler) -> Iterator[None]:
    """Errors that towerd logs reach this handler alone, inside the block."""
    logger, level = logging.getLogger("towerd"), logging.root.manager.disable
    # these tell of each thread that a power cut ends
    pools = logging.getLogger("concurrent.futures")
    logging.disable(logging.WARNING)
    try:
        with (
            patch.object(logger, "propagate", False),
            patch.object(pools, "disabled", True),
            patch("logging.logThreads", False),
        ):
            logger.addHandler(handler)
            yield
    finally:
        logger.removeHandler(handler)
        logging.disable(level)


@cache
def _open_encrypted() -> None:
    """What is imported for the first one may make locks, and the cipher is tried with random bytes: none of it is to be a
    life's."""
    libcrypto()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        encrypt(root)
        Store.open(root, ROW_IDENTITY).close()


class House:
    """The lives of one store with all that works on it. Each ends with a power cut or a clean stop."""

    kind = "house"

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(f"house {seed}")
        self._jumps = random.Random(f"clock {seed}")
        self.seed, self.folder = seed, folder
        self.now = 1e9
        self.told = Told()
        self.marks = Marks()
        self.words = Words()
        self.lost = LostRows()
        """In this life."""
        self.kept: set[Tokens] = set()
        """Paths whose last segments have rows that nothing may take away until the next life begins."""
        self.operations: list[str] = []
        self.turns: list[str] = []
        """The threads in the order in which they ran."""
        self.policy = self.rng.choice(sorted(NAMES))
        self.form = self.rng.choice(_FORMATS)
        self.kinds = KINDS
        """What clients do in this life besides turns."""
        self.n_deletions = 0
        self.deleted: list[tuple[str, int]] = []
        """Sessions that were deleted, each with how often any was begun to be deleted before."""
        self.deleting: dict[str, list[Made]] = {}
        """What the deletions of a session that are under way take."""
        self.n_steps = 0
        """Turns of workflows in this life."""
        self.is_encrypted = self.rng.random() < ENCRYPTED_SHARE
        if self.is_encrypted:
            _open_encrypted()
        codec()

    def clock(self) -> float:
        """Seconds, which may jump either way."""
        self.now += self._jumps.choice((0.0, 1e-3, 1.0, 60.0, 700.0, 1e6, -3600.0))
        return self.now

    def run(self, prepare: Callable[[Path], None]) -> None:
        """Live and check. prepare: called with the store's directory. Raises AssertionError, or whatever a thread
        should not raise."""
        root = self.folder / "0"
        root.mkdir()
        prepare(root)
        if self.is_encrypted:
            encrypt(root)
        complaints = Complaints(self)
        for life in range(LIVES + 1):
            is_last = life == LIVES
            cut_at = (
                None
                if is_last
                else self.rng.choice((None, self.rng.randint(40, 250), self.rng.randint(150, 700)))
            )
            rng = random.Random(f"life {life} of {self.seed}")
            self.scheduler = Scheduler(rng)
            self.disk = BusyDisk(root, cut_at, self.scheduler, rng)
            with (
                threads_on(self.scheduler) as self.pool,
                edges_on(self.disk, rng, self.clock),
                connections_guarded(),
                file_locks_on(self.scheduler),
                heard_by(complaints),
                pins_watched(self),
            ):
                self._lived(n_clients=0 if is_last else self.rng.randint(2, 4))
            self.operations += [f"life {life}: {each}" for each in self.disk.trace[-6:]]
            how = "stop" if self.scheduler.was_finished else "power cut"
            self.operations.append(f"life {life} ends: {how}")
            self.turns += self.scheduler.trace
            self.operations.append(f"life {life}: {self.disk.n_changes} changes")
            root = self.folder / str(life + 1)
            self.disk.after_cut(root, self.rng)

    def _lived(self, n_clients: int) -> None:
        """One life; all threads have ended after it."""
        try:
            self._live(n_clients)
        except PowerLost:
            pass
        except StoreError as error:
            if not self.disk.is_off:
                self.scheduler.end(error)
                self._left()
                raise
        except BaseException as error:
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
            self.store.close()

    def _draw_kinds(self) -> None:
        """A few of all that clients do, so that these meet each other often; in some lives in one session."""
        self.is_crowded = self.rng.random() < 0.2
        self.has_guests = self.rng.random() < GUESTS_SHARE
        self.kinds = (
            CROWDED if self.is_crowded else frozenset(self.rng.sample(sorted(KINDS), N_KINDS))
        )
        self.deleted, self.deleting, self.n_steps = [], {}, 0
        self.lost = LostRows()

    def tenant_of(self, client: str) -> tuple[str, str]:
        """The tenant of a client, and what its names begin with: two tenants have the same names."""
        is_guest = self.has_guests and client in "cd"
        return (GUEST, "ab"["cd".index(client)]) if is_guest else (SCOPE, client)

    def _live(self, n_clients: int) -> None:
        self._draw_kinds()
        with self._opened():
            clients = [
                Client(self, name, random.Random(f"{name} {self.rng.random()}"))
                for name in "abcd"[:n_clients]
            ]
            threads = [threading.Thread(target=each.run, name=each.name) for each in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self._check_rest()
        self.pool.shutdown()
        for left in self.scheduler.alive():  # what ends by itself
            self.scheduler.join(left)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        self.store = store = Store.open(self.disk.root, ROW_IDENTITY, clock=self.clock)
        self._check(store)
        self.hot_bytes = self.rng.choice(_HOT_BYTES)
        self.warm_bytes = self.rng.choice(_WARM_BYTES)
        self.tiers = Tiers(
            store,
            LAYOUT,
            v_trans=False,
            hot_bytes=self.hot_bytes,
            warm_bytes=self.warm_bytes,
            policy=self.policy,
            forced=LevelFormats((self.form,)),
            shrink_after_s=600.0,
            prefetch_bytes=1 << 20,
            thaws_ahead=True,
            clock=self.clock,
        )
        store.writes.budget = self.rng.choice((0, 0, 400_000))
        store.disk.bytes_max = self.rng.choice((0, 0, 0, 600_000))
        if store.disk.bytes_max:  # the oldest leave for it
            self.told.begin({("medium", each): None for each in self.told.possible("medium")})
        self.has_room = max(store.writes.budget, store.disk.bytes_max) == 0 and (
            self.warm_bytes == NO_LIMIT
        )
        """Rows never leave for want of space."""
        self.states = CheckpointTier(
            store, bytes_max=self.rng.choice((10_000, NO_LIMIT)), exact=False, clock=self.clock
        )
        self.traffic = Traffic(store, self.tiers, None, self.clock)
        self.recorder = TurnRecorder(store, self.traffic)
        yield
        self.traffic.close()
        close_tiers(self.tiers, self.states)
        self.operations.append("close")
        store.close()

    # --- what it must have ----------------------------------------------------------------

    def _check(self, store: Store) -> None:
        said = found_in(store)
        found = said.each() | foreign_in(store)
        wrong = self.told.wrong(found, ignored="title")
        assert not wrong, "\n".join(wrong)
        self.told.settle(found)
        assert self.kept <= said.written, f"rows are gone of {self.kept - said.written}"
        self.kept = set()
        for node in store.nodes():
            check_rows(store, node)
        problems = store.verify().problems
        assert not problems, problems
        store.check_integrity(keys=True)

    def _check_rest(self) -> None:
        """All is at rest: nothing is over its limit, and what was acknowledged is there."""
        self.disk.full_left = 0
        for _ in range(2):
            self.tiers.flush()
            self.states.flush()
        store = self.store
        if not self.disk.n_refused:  # it may have let files go before the catalog heard of it
            self.tiers.check_integrity()
        wrong = self.told.wrong(found_in(store).each() | foreign_in(store), ignored="title")
        assert not wrong, "\n".join(wrong)
        if max(store.writes.budget, store.disk.bytes_max) == 0:
            self.lost.check_written(store)
        check_apart(store)
        with store.locked():
            nodes, files = store.nodes(), store.files()
            hot = sum(node.hot.nbytes for node in nodes if node.hot is not None)
            warm = sum(file.nbytes for file in files)
            assert (hot, warm) == (store.state.hot_bytes, store.state.warm_bytes)
            loose = [each for each in files if not any(n.pinned for n in store.viewers(each))]
            if not self.disk.n_refused:
                assert hot <= self.hot_bytes, f"{hot} bytes in RAM, {self.hot_bytes} may be"
                assert warm <= self.warm_bytes or not loose, f"{warm} bytes of files"
                states = [each for each in self.states.table.all() if not each.node.pinned]
                n_bytes = self.states.table.file_bytes
                assert n_bytes <= self.states.bytes_max or not states, f"{n_bytes} of states"
        assert not self.traffic.running("nobody")
        if not self.disk.n_refused:
            self.marks.check_gone(self)
            n_steps = self.traffic.stats()["workflow_steps"]
            assert n_steps == self.n_steps, (
                f"{n_steps} steps of workflows, {self.n_steps} asked for"
            )
            if self.rng.random() < 0.3:
                forget_guest(self)
        if self.has_room:
            self.kept = found_in(store).written
