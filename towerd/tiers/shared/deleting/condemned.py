"""Condemned lists: what is deleted before long, and so may be named by nothing new.

gc/condemned/KEY-ID    a list: places of records and marks, and objects/NAME for all parts of an object
gc/known/KEY-ID        put once the list is: a lease that is younger has seen it
gc/doomed/KEY-ID       those of the list that nothing names, nor ever will
gc/swept/KEY-ID        put once these are deleted

KEY tells the lists of one key file from those of another, whose names are others. The lists of daemons before this
had none: of these one that cannot be read may be anyone's.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from towerd.slots.errors import StateError
from towerd.tiers.shared.bucket import Bucket, BucketError, ObjectMissing
from towerd.tiers.shared.sealing import TenantKeys

log = logging.getLogger(__name__)

FOLDER = "gc"
LISTS_MAX = 1_000_000
"""Each conversation that is deleted makes one."""
LIST_MAX = 50_000
"""Places of one list."""
SETTLED_S = 3600.0
"""No list is younger when all that was sent for it has landed."""
_BYTES_MAX = 1 << 27
_KEY_DIGITS = 8
_WITHOUT_KEY = re.compile(r"[0-9a-f]{32}")


class ListUnreadable(BucketError):
    """A list is damaged, or somebody else's."""


@dataclass(frozen=True, slots=True)
class Phases:
    """The lists of one key in a bucket: when each phase of one began, by its id."""

    swept: dict[str, datetime]
    doomed: dict[str, datetime]
    known: dict[str, datetime]
    condemned: dict[str, datetime]


def place_of(phase: str, id: str) -> str:
    """Where a phase of a list is noted."""
    return f"{FOLDER}/{phase}/{id}"


class CondemnedLists:
    """Reads lists, each once: they do not change. Belongs to one thread at a time."""

    def __init__(self, bucket: Bucket, keys: TenantKeys) -> None:
        """keys: the collector's"""
        self._bucket, self._keys = bucket, keys
        self._key = keys.name("lists")[:_KEY_DIGITS]
        self._known: dict[str, frozenset[str]] = {}
        self.passed_over: list[str] = []
        """Places of lists that could not be read when `all` was asked last, and hold back nothing."""

    def new_id(self) -> str:
        """Of a list that nobody has put."""
        return f"{self._key}-{secrets.token_hex(16)}"

    def phases(self) -> Phases:
        """The last phase is listed first, and removed last: so what is seen of a list is never less than its
        phase when this was called. Raises BucketError."""
        return Phases(*(self._ids(phase) for phase in ("swept", "doomed", "known", "condemned")))

    def sealed(self, place: str, places: Iterable[str]) -> bytes:
        """The bytes of a list."""
        return self._keys.seal(place, msgspec.msgpack.encode(sorted(places)))

    def all(self, now: Callable[[], datetime]) -> frozenset[str]:
        """What is on any list. now: by the store's clock, not before this was called. Raises BucketError; ListUnreadable
        for a list that cannot be passed over."""
        ids, self.passed_over = self._ids("condemned"), []
        known = {
            place: self._known.get(place) for place in (place_of("condemned", id) for id in ids)
        }
        self._known = {place: of for place, of in known.items() if of is not None}
        found = []
        for id, since in ids.items():
            try:
                found.append(self.read(place_of("condemned", id)))
            except ListUnreadable as error:
                found.append(self._instead(id, now() - since, error))
        return frozenset().union(*found)

    def read(self, place: str) -> frozenset[str]:
        """One list; none of a list that was removed. Raises BucketError, ListUnreadable."""
        if place not in self._known:
            self._known[place] = self.read_again(place)
        return self._known[place]

    def read_again(self, place: str) -> frozenset[str]:
        """The same, as it is there now."""
        try:
            data = self._keys.unseal(place, self._bucket.get(place, _BYTES_MAX))
            return frozenset(msgspec.msgpack.decode(data, type=list[str]))
        except ObjectMissing:
            return frozenset()
        except (StateError, msgspec.MsgspecError) as error:
            raise ListUnreadable(
                f"The shared tier has a list of what is being deleted at {place} that cannot be read: {error}. It is "
                f"passed over once it is an hour old, unless its phase in gc/doomed cannot be read either: then stop all "
                f"daemons that use this store for an hour, and delete both objects."
            ) from error

    def is_own(self, id: str) -> bool:
        """Whether a list was put with this key for certain."""
        return id.startswith(f"{self._key}-")

    def _instead(self, id: str, age: timedelta, error: ListUnreadable) -> frozenset[str]:
        """What is deleted on the strength of a list that cannot be read: what was doomed of it, or nothing, now nor
        later. docs/shared.md says why. Raises ListUnreadable."""
        if age < timedelta(seconds=SETTLED_S):
            raise error
        place = place_of("condemned", id)
        if id in self._ids("doomed"):
            try:
                return self.read(place_of("doomed", id))
            except ListUnreadable:
                if self.is_own(id):
                    raise
                self.passed_over.append(place)
                return frozenset()  # another key's names are none of ours
        if self.is_own(id):
            self._bucket.delete(place)
        self.passed_over.append(place)
        log.warning("a list of what is deleted cannot be read", extra={"object": place})
        return frozenset()

    def _ids(self, phase: str) -> dict[str, datetime]:
        """Of the lists of this key, and of daemons before this. Others name nothing that this key names."""
        listed = self._bucket.listing(f"{FOLDER}/{phase}", LISTS_MAX)
        ids = {each.place.rpartition("/")[2]: each.modified for each in listed}
        return {
            id: since
            for id, since in ids.items()
            if self.is_own(id) or _WITHOUT_KEY.fullmatch(id) is not None
        }
