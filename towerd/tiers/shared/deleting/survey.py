"""Survey: what a bucket has, and what of that is garbage."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime

from towerd.slots.errors import StateError
from towerd.tiers.shared.bucket import Bucket, BucketError, Listed, ObjectMissing
from towerd.tiers.shared.naming import (
    NAMING_BYTES_MAX,
    RECORD_BYTES_MAX,
    Naming,
    is_whole,
    read_naming,
)
from towerd.tiers.shared.records import TOWERS, NamedRecord, named_records
from towerd.tiers.shared.sealing import TenantKeys

log = logging.getLogger(__name__)

OBJECTS_MAX = 10_000_000
"""Of one listing."""
READS_AT_ONCE = 4
_UNREADABLE_SAID = 3


@dataclass(slots=True)
class Contents:
    """What a bucket has: of each object its size, and when its last part was put."""

    records: dict[str, NamedRecord]
    named: frozenset[str]
    """Names of the objects that a record names."""
    sizes: dict[str, int] = field(default_factory=dict)
    ages_s: dict[str, float] = field(default_factory=dict)


class Survey:
    """Belongs to one thread at a time. What an object names is read once."""

    def __init__(self, bucket: Bucket, keys: TenantKeys) -> None:
        """keys: the collector's"""
        self._bucket, self._keys = bucket, keys
        self._namings: dict[str, tuple[datetime, Naming]] = {}
        """By place, of the object that was put there then."""

    def found(self, now: datetime) -> Contents:
        """What the bucket has. Raises BucketError, also if it has records that cannot be read."""
        named, records = self.records()
        found = Contents(records, named)
        marks = self._bucket.listing("marks", OBJECTS_MAX)
        for each in [*self._bucket.listing("objects", OBJECTS_MAX), *marks]:
            is_mark = each.place.startswith("marks/")
            place = each.place if is_mark else each.place.rpartition("/")[0]
            age_s = (now - each.modified).total_seconds()
            found.sizes[place] = found.sizes.get(place, 0) + each.n_bytes
            found.ages_s[place] = min(age_s, found.ages_s.get(place, age_s))
        self._read(marks)
        there = {*records, *(each.place for each in marks)}
        self._namings = {place: of for place, of in self._namings.items() if place in there}
        return found

    def records(self) -> tuple[frozenset[str], dict[str, NamedRecord]]:
        """What all records name, and the records. Raises BucketError, also for one that cannot be read."""
        listed = [
            each
            for folder in ("sessions", "bases", TOWERS)
            for each in self._bucket.listing(folder, OBJECTS_MAX)
        ]
        records = {each.place: each for each in named_records(listed)}
        unreadable = {each.place: "it is no record" for each in listed if each.place not in records}
        unreadable |= self._read(each for each in listed if each.place in records)
        if unreadable:
            raise BucketError(_said(unreadable))
        read = (self.naming(place) for place in records)
        return frozenset(name for each in read if each for name in each.objects), records

    def naming(self, place: str) -> Naming | None:
        """What an object names; None if it is gone, or cannot be read."""
        return self._namings[place][1] if place in self._namings else None

    def is_whole(self, place: str) -> bool:
        """Whether a record is what its writer sealed, as read now. Raises BucketError."""
        named = self.naming(place)
        try:
            data = self._bucket.get(place, RECORD_BYTES_MAX + NAMING_BYTES_MAX)
        except ObjectMissing:
            return False
        return named is not None and is_whole(named, data)

    def is_garbage(self, place: str, named: frozenset[str]) -> bool:
        """Whether nothing needs an object: rows that no record names, a mark of such rows, a record on a list."""
        if place.startswith("objects/"):
            return place.partition("/")[2] not in named
        if place.startswith("marks/"):
            known = self.naming(place)
            return known is None or not named.issuperset(known.objects)
        return True

    def _read(self, listed: Iterable[Listed]) -> dict[str, str]:
        """Read what objects name; those of which it cannot be told, and why. One that is gone is passed over."""

        def one(each: Listed) -> Naming | StateError | None:
            try:
                if not each.n_bytes:
                    raise StateError("it is empty")
                return read_naming(self._bucket, self._keys, each.place)
            except ObjectMissing:
                return None
            except StateError as error:
                return error

        new = [each for each in listed if self._namings.get(each.place, ("",))[0] != each.modified]
        unreadable = {}
        with ThreadPoolExecutor(READS_AT_ONCE, "towerd-gc") as pool:
            for each, found in zip(new, pool.map(one, new), strict=True):
                self._namings.pop(each.place, None)
                if isinstance(found, Naming):
                    self._namings[each.place] = each.modified, found
                elif found is not None:
                    said = {"object": each.place, "error": str(found)}
                    log.warning("an object of the shared tier cannot be read", extra=said)
                    unreadable[each.place] = str(found)
        return unreadable


def _said(unreadable: dict[str, str]) -> str:
    """Which they are, and what to do."""
    some = sorted(unreadable.items())[:_UNREADABLE_SAID]
    which = "; ".join(f"{place} ({why})" for place, why in some)
    n = len(unreadable)
    are, they, them = ("record", "it", "it") if n == 1 else ("records", "they", "them")
    return (
        f"The shared tier has {n} {are} that cannot be read with this key, so nothing that {they} may name is "
        f"deleted: {which}. Where that is an older towerd's or damaged, push its session or base again and delete "
        f"{them} with the object store's own tool; two keys need a folder of the bucket each."
    )
