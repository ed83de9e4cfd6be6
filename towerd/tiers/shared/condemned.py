"""Condemned lists: what is deleted before long, and so may be named by nothing new.

gc/condemned/ID    a list: places of records and marks, and objects/NAME for all parts of an object
gc/known/ID        put once the list is: a lease that is younger has seen it
gc/doomed/ID       those of the list that nothing names, nor ever will
gc/swept/ID        put once these are deleted
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

import msgspec

from towerd.slots.errors import StateError
from towerd.tiers.shared.bucket import Bucket, BucketError, ObjectMissing
from towerd.tiers.shared.sealing import TenantKeys

FOLDER = "gc"
LISTS_MAX = 1_000_000
"""Each conversation that is deleted makes one."""
LIST_MAX = 50_000
"""Places of one list."""
_BYTES_MAX = 1 << 27


@dataclass(frozen=True, slots=True)
class Phases:
    """The lists of a bucket: when each phase of one began, by its id."""

    swept: dict[str, datetime]
    doomed: dict[str, datetime]
    known: dict[str, datetime]
    condemned: dict[str, datetime]


def read_phases(bucket: Bucket) -> Phases:
    """The last phase is listed first, and removed last: so what is seen of a list is never less than its
    phase when this was called. Raises BucketError."""
    return Phases(*(_ids(bucket, phase) for phase in ("swept", "doomed", "known", "condemned")))


def place_of(phase: str, id: str) -> str:
    """Where a phase of a list is noted."""
    return f"{FOLDER}/{phase}/{id}"


def sealed_list(keys: TenantKeys, place: str, places: Iterable[str]) -> bytes:
    """The bytes of a list. keys: the collector's"""
    return keys.seal(place, msgspec.msgpack.encode(sorted(places)))


class CondemnedLists:
    """Reads lists, each once: they do not change. Belongs to one thread at a time."""

    def __init__(self, bucket: Bucket, keys: TenantKeys) -> None:
        """keys: the collector's"""
        self._bucket, self._keys = bucket, keys
        self._known: dict[str, frozenset[str]] = {}

    def all(self) -> frozenset[str]:
        """What is on any list now. Raises BucketError, also for a list that cannot be read."""
        places = [place_of("condemned", id) for id in _ids(self._bucket, "condemned")]
        self._known = {place: self._known[place] for place in places if place in self._known}
        found = [self.read(place) for place in places]
        return frozenset().union(*found)

    def read(self, place: str) -> frozenset[str]:
        """One list; none of a list that was removed. Raises BucketError."""
        if place not in self._known:
            try:
                data = self._keys.unseal(place, self._bucket.get(place, _BYTES_MAX))
                self._known[place] = frozenset(msgspec.msgpack.decode(data, type=list[str]))
            except ObjectMissing:
                return frozenset()
            except (StateError, msgspec.MsgspecError) as error:
                raise BucketError(
                    f"What is being deleted of the shared tier cannot be read at {place}: {error}."
                ) from error
        return self._known[place]


def _ids(bucket: Bucket, phase: str) -> dict[str, datetime]:
    listed = bucket.listing(f"{FOLDER}/{phase}", LISTS_MAX)
    return {each.place.rpartition("/")[2]: each.modified for each in listed}
