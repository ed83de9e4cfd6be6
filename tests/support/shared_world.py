"""A world of daemons that share one bucket: each request of any of them is a step of one schedule, drawn from a seed.

The client and the code over it are the real ones; the objects are in RAM. What the world adds to a request: it waits
while others run, fails before or after it has done its work, lands later, or once more, and its daemon may die.
"""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from obstore.store import MemoryStore

from towerd.tiers.shared.bucket import Bucket, BucketError, Listed, ObjectMissing
from towerd.tiers.shared.deleting.condemned import CondemnedLists
from towerd.tiers.shared.naming import read_naming
from towerd.tiers.shared.sealing import TenantKeys

T = TypeVar("T")
Body = Callable[["WorldBucket", Callable[[], float]], None]

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
DAY_S = 86_400.0
WAITS_S_MAX = 650.0
"""A request of a daemon that lives waits no longer; an object of four parts is read in less than LEASE_S - HOLD_S."""
FAULTS = 0.01
"""Of all requests."""
PACE_STEPS = 40
PACES = ((60, 38, 2, 0), (60, 38, 2, 0), (20, 40, 30, 10), (0, 0, 20, 80))
"""How often a step takes up to 0, 1, 60 and 600 s, while things go one way or another."""
LATE_S_MAX = 2300.0
"""What was sent and got no answer lands so much later, or never."""


class Dies(BaseException):
    """The process of a daemon ends."""


@dataclass(eq=False, slots=True)
class Daemon:
    """One process. Its clock began at some moment, as that of no other did."""

    body: Body
    offset: float
    is_faulty: bool
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    sent: float | None = None
    """When its request was sent; None: it has none."""
    fate: str = ""
    is_dead: bool = False
    is_done: bool = False


class World:
    """The bucket, the time of its store, and the schedule."""

    def __init__(self, seed: int, collector: TenantKeys) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.raw = Bucket(MemoryStore())
        self.modified: dict[str, float] = {}
        self.n_parts: dict[str, int] = {}
        """Of each object, once it was whole."""
        self.collector = collector
        self.late: list[tuple[float, Callable[[], object]]] = []
        self.daemons: list[Daemon] = []
        self.is_calm = False
        self.problems: list[str] = []
        self.n_steps = 0
        self._back = threading.Semaphore(0)
        self._lists = CondemnedLists(self.raw, collector)
        self._names: dict[str, list[str]] = {}
        self._pace = PACES[0]

    # --- for daemons ----------------------------------------------------------------------

    def start(self, body: Body, *, is_faulty: bool = True) -> None:
        """Run `body(bucket, clock)` as a process of its own, and another one when it dies."""
        daemon = Daemon(body, self.rng.uniform(-DAY_S, DAY_S), is_faulty)

        def run() -> None:
            try:
                body(WorldBucket(self, daemon), lambda: self.now + daemon.offset)
            except Dies:
                pass
            except BaseException:
                self.problems.append(traceback.format_exc())
            daemon.is_done = True
            self._back.release()

        self.daemons.append(daemon)
        threading.Thread(target=run, daemon=True).start()
        self._back.acquire()

    def wait(self, daemon: Daemon, seconds: float = 0.0) -> str:
        """Wait until a request may run that is sent after `seconds`; its fate. Raises Dies."""
        if daemon.is_dead:
            raise Dies
        daemon.sent = self.now + seconds
        self._back.release()
        daemon.go.acquire()
        daemon.sent = None
        if daemon.is_dead and daemon.fate != "dies after":
            raise Dies
        return daemon.fate

    # --- the schedule ---------------------------------------------------------------------

    def run(self, n_steps: int, check: Callable[[], None]) -> None:
        """Run all daemons for so many requests, then let each end what it does, with nothing more that fails."""
        while True:
            waiting = [each for each in self.daemons if not each.is_done]
            self.is_calm = self.n_steps >= n_steps or bool(self.problems)
            if not waiting:
                break
            self._let_time_pass(waiting)
            sent = [each for each in waiting if each.sent is not None and each.sent <= self.now]
            self._step(min(sent, key=self._urgency))
            check()
        for at, land in sorted(self.late, key=lambda each: each[0]):
            self.now = max(self.now, at)
            land()

    def _urgency(self, daemon: Daemon) -> tuple[bool, float]:
        """The one whose time is up, or any."""
        assert daemon.sent is not None
        return self.now - daemon.sent < WAITS_S_MAX, self.rng.random()

    def _let_time_pass(self, waiting: list[Daemon]) -> None:
        if self.n_steps % PACE_STEPS == 0:
            self._pace = self.rng.choice(PACES)
        span = self.rng.choices((0.0, 1.0, 60.0, 600.0), self._pace)[0]
        first = min(each.sent for each in waiting if each.sent is not None)
        until = first + WAITS_S_MAX
        self.now = max(self.now, first, min(self.now + span * self.rng.random(), until))
        due = [each for each in self.late if each[0] <= self.now]
        self.late = [each for each in self.late if each[0] > self.now]
        for _, land in due:
            land()

    def _step(self, daemon: Daemon) -> None:
        self.n_steps += 1
        daemon.fate = "runs"
        if daemon.is_faulty and not self.is_calm and self.rng.random() < FAULTS:
            fates = ("lost", "no answer", "late", "twice", "dies", "dies after", "dies, late")
            daemon.fate = self.rng.choice(fates)
        daemon.is_dead = daemon.fate.startswith("dies")
        daemon.go.release()
        self._back.acquire()
        if daemon.is_done and daemon.is_dead and not self.is_calm:
            self.start(daemon.body, is_faulty=daemon.is_faulty)

    def later(self, work: Callable[[], object]) -> None:
        """Let a request land late."""
        self.late.append((self.now + self.rng.uniform(0, LATE_S_MAX), work))

    # --- what is true ---------------------------------------------------------------------

    def put(self, place: str, data: bytes) -> bool:
        """What the store does."""
        is_new = self.raw.put(place, data)
        if is_new:
            self.modified[place] = self.now
            kind, _, rest = place.partition("/")
            name, _, part = rest.partition("/")
            if kind == "objects":
                self.n_parts[name] = max(int(part) + 1, self.n_parts.get(name, 0))
        return is_new

    def delete(self, place: str) -> None:
        self.raw.delete(place)
        self.modified.pop(place, None)

    def places(self, folder: str) -> list[str]:
        return [each for each in self.modified if each.startswith(folder + "/")]

    def live_records(self) -> dict[str, list[str]]:
        """The records that nobody is deleting, and the objects that they name."""
        gone = self._lists.all(lambda: EPOCH + timedelta(seconds=self.now))
        places = [each for each in self.places("sessions") if each not in gone]
        for each in places:
            if each not in self._names:
                self._names[each] = read_naming(self.raw, self.collector, each).objects
        return {each: self._names[each] for each in places}


class WorldBucket(Bucket):
    """The client of one daemon."""

    def __init__(self, world: World, daemon: Daemon | None = None) -> None:
        """daemon: None for one that asks while nothing else runs"""
        super().__init__(MemoryStore())
        self._world, self._daemon = world, daemon
        self.read_live = False
        """Whether what was read last is a record that nobody was deleting then."""

    def _done(self, what: str, work: Callable[[], T], *, changes: bool = False) -> T:
        world = self._world
        if self._daemon is None:
            return work()
        fate = world.wait(self._daemon)
        if fate in ("runs", "twice"):
            if fate == "twice" and changes:
                world.later(work)
            return work()
        if fate in ("late", "dies, late") and changes:
            world.later(work)
        elif fate in ("no answer", "dies after"):
            with suppress(ObjectMissing):
                work()
        if self._daemon.is_dead:
            raise Dies
        raise BucketError(f"The shared tier cannot {what}: it did not answer.")

    def sleep(self, seconds: float) -> None:
        """Let others run for a time up to `seconds`; the daemon may die meanwhile."""
        if self._daemon is not None and not self._world.is_calm:
            self._world.wait(self._daemon, self._world.rng.uniform(0, seconds))
            if self._daemon.is_dead:
                raise Dies

    def put(self, place: str, data: bytes) -> bool:
        return self._done("put", lambda: self._world.put(place, data), changes=True)

    def delete(self, place: str) -> None:
        self._done("delete", lambda: self._world.delete(place), changes=True)

    def has_each(self, places: Sequence[str]) -> list[bool]:
        return [self.has(place) for place in places]

    def get(self, place: str, bytes_max: int) -> memoryview:
        def get() -> memoryview:
            is_record = place.startswith("sessions/")
            self.read_live = is_record and place in self._world.live_records()
            return self._world.raw.get(place, bytes_max)

        return self._done("get", get)

    def has(self, place: str) -> bool:
        return self._done("tell", lambda: self._world.raw.has(place))

    def start_of(self, place: str, n_bytes: int) -> bytes:
        return self._done("give", lambda: self._world.raw.start_of(place, n_bytes))

    def modified(self, place: str) -> datetime:
        def modified() -> datetime:
            if place not in self._world.modified:
                raise ObjectMissing(f"There is no {place}.")
            return EPOCH + timedelta(seconds=self._world.modified[place])

        return self._done("tell", modified)

    def listing(self, folder: str, most: int = 0) -> list[Listed]:
        def listing() -> list[Listed]:
            times = self._world.modified
            return [
                Listed(each.place, EPOCH + timedelta(seconds=times[each.place]), each.n_bytes)
                for each in self._world.raw.listing(folder)
            ]

        return self._done("list", listing)
