"""Leases: say that somebody reads or writes, so that nothing is deleted under them.

    leases/ID/NUMBER-SECONDS    put by the holder ID, who had begun so many seconds before, or less

A lease holds back every list of `condemned.py` that is younger than its beginning; older ones its holder reads, and
names nothing of them. A writer takes one before it asks for anything, a reader once it takes long. Times are
the store's; spans are the holder's, by a clock that counts on while a machine sleeps.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from towerd.tiers.shared.bucket import Bucket, BucketError
from towerd.tiers.shared.deleting.condemned import CondemnedLists
from towerd.tiers.shared.sealing import TenantKeys

log = logging.getLogger(__name__)

FOLDER = "leases"
RENEW_S = 300.0
"""A holder renews a lease that is older before it does anything more."""
HOLD_S = 600.0
"""Nothing is sent to the bucket on the strength of an older one."""
LEASE_S = 3600.0
"""One that is older counts no more. What was sent lands within LEASE_S - HOLD_S, or never."""
GRACE_S = 3600.0
"""What is doomed is deleted after this time. A reader without a lease has read its object by then."""
SKEW_S = 60.0
"""Two times of the store may be so far from their order."""


def awake_or_asleep() -> float:
    """Seconds, as time.monotonic(), also while the machine sleeps."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux; elsewhere CLOCK_MONOTONIC does so
    return time.clock_gettime(time.CLOCK_MONOTONIC if clock is None else clock)


class Hold:
    """What one thread does with a bucket between taking a lease and ending it."""

    def __init__(
        self, bucket: Bucket, lists: CondemnedLists, clock: Callable[[], float] = awake_or_asleep
    ) -> None:
        self.id = secrets.token_hex(16)
        self._bucket, self._lists, self._clock = bucket, lists, clock
        self._began = clock()
        self._renewed = self._began
        """When the last lease was sent; before the first one: when this began."""
        self._places: list[str] = []
        self._condemned: frozenset[str] | None = None
        self._is_unsure = False
        """Whether something was sent that may yet land."""

    def reading(self) -> None:
        """To be called before each object is read. Raises nothing."""
        if self._clock() - self._renewed > RENEW_S:
            try:
                self._renew()
                self._checked_age()
            except BucketError as error:  # its rows may go, which costs their evaluation
                log.warning("no lease for a long fetch", extra={"error": error.message})

    def writing(self) -> None:
        """To be called before each object is named or put. Raises BucketError, also if this came to a stop for too
        long."""
        if self._condemned is None:
            self._renew()
            self._condemned = self._lists.all(self._now)
        if self._checked_age() > RENEW_S:
            self._renew()

    def has(self, place: str) -> bool:
        """Whether there is an object. Raises BucketError."""
        self.writing()
        return self._bucket.has(place)

    def put(self, place: str, data: bytes) -> bool:
        """Make an object; False if there is one, which stays. Raises BucketError."""
        self.writing()
        self._is_unsure = True
        is_new = self._bucket.put(place, data)
        self._is_unsure = False
        self._checked_age()
        return is_new

    def is_condemned(self, place: str) -> bool:
        """Whether the object may not be named. Raises BucketError."""
        self.writing()
        return self._condemned is not None and place in self._condemned

    def free_name(self, name: str) -> str:
        """The name to put rows or a basis under: another one while that is being deleted. Raises BucketError."""
        number, free = 0, name
        while self.is_condemned(f"objects/{free}"):
            number += 1
            free = f"{name}-{number}"
        return free

    def now(self) -> datetime:
        """By the store's clock, at the last renewal. Raises BucketError."""
        self.writing()
        return self._now()

    def end(self) -> None:
        """End the lease, if there is one, unless something that was sent may yet land: then it ends by its age.
        Raises nothing."""
        if not self._is_unsure:
            with suppress(BucketError):
                for place in self._places:
                    self._bucket.delete(place)

    def _checked_age(self) -> float:
        """Seconds since the last lease was sent. Raises BucketError if it may count no more when something lands."""
        age = self._clock() - self._renewed
        if age > HOLD_S:
            raise BucketError(
                f"The shared tier was left for {age:.0f} s while writing: put it again."
            )
        return age

    def _now(self) -> datetime:
        return self._bucket.modified(self._places[-1])

    def _renew(self) -> None:
        sent = self._clock()
        ago = int(sent - self._began) + 1
        if ago > 1:  # what was read before is held, too, however long this request takes
            ago += int(HOLD_S)
        place = f"{FOLDER}/{self.id}/{len(self._places):06d}-{ago}"
        self._places.append(place)
        self._bucket.put(place, b"")
        self._renewed = sent


class Holds:
    """One hold for each thread. Thread-safe."""

    def __init__(
        self, bucket: Bucket, keys: TenantKeys, clock: Callable[[], float] = awake_or_asleep
    ) -> None:
        """keys: the collector's"""
        self._bucket, self._keys, self._clock = bucket, keys, clock
        self._own = threading.local()

    @contextmanager
    def held(self) -> Iterator[Hold]:
        """The hold of this thread, which ends with the outermost of these."""
        outer: Hold | None = getattr(self._own, "hold", None)
        if outer is not None:
            yield outer
            return
        lists: CondemnedLists | None = getattr(self._own, "lists", None)
        if lists is None:
            lists = self._own.lists = CondemnedLists(self._bucket, self._keys)
        hold = self._own.hold = Hold(self._bucket, lists, self._clock)
        try:
            yield hold
        finally:
            self._own.hold = None
            hold.end()


@dataclass(frozen=True, slots=True)
class Lease:
    """One that counts."""

    id: str
    began: datetime


@dataclass(frozen=True, slots=True)
class Leases:
    """Those of a bucket at one moment."""

    active: list[Lease]
    ended: list[str]
    """Places of those that ended by their age."""

    def hold_back(self, since: datetime, own: str) -> bool:
        """Whether anybody but `own` may have begun before a phase of a list."""
        latest = since + timedelta(seconds=SKEW_S)
        return any(lease.id != own and lease.began <= latest for lease in self.active)


LEASES_MAX = 1_000_000


def read_leases(bucket: Bucket, now: datetime) -> Leases:
    """Raises BucketError."""
    places: dict[str, list[str]] = {}
    began: dict[str, datetime] = {}
    last: dict[str, datetime] = {}
    for each in bucket.listing(FOLDER, LEASES_MAX):
        id, _, name = each.place.partition("/")[2].partition("/")
        ago = name.partition("-")[2]
        since = each.modified - timedelta(seconds=int(ago) if ago.isdecimal() else 0)
        places.setdefault(id, []).append(each.place)
        began[id] = min(since, began.get(id, since))
        last[id] = max(each.modified, last.get(id, each.modified))
    active = {id for id in places if now - last[id] <= timedelta(seconds=LEASE_S)}
    ended = [place for id, of in places.items() if id not in active for place in of]
    return Leases([Lease(id, began[id]) for id in sorted(active)], ended)
