"""Collector: deletes from a bucket what no record names. docs/shared.md has the protocol, and why nobody loses a race.

A run takes each list of `condemned.py` one phase further. Any number of runs may go at once, and end anywhere.
"""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from towerd.slots.errors import StateError
from towerd.tiers.shared.bucket import Bucket, BucketError, Listed, ObjectMissing
from towerd.tiers.shared.condemned import (
    LIST_MAX,
    CondemnedLists,
    place_of,
    read_phases,
    sealed_list,
)
from towerd.tiers.shared.leases import (
    GRACE_S,
    HOLD_S,
    LEASE_S,
    Hold,
    Holds,
    awake_or_asleep,
    read_leases,
)
from towerd.tiers.shared.naming import Naming, read_naming
from towerd.tiers.shared.records import NamedRecord, named_records
from towerd.tiers.shared.sealing import TenantKeys

log = logging.getLogger(__name__)

OBJECTS_MAX = 10_000_000
"""Of one listing."""
COPIES_MIN = 2
"""Later records that have to contain one before it is deleted: the last may turn out to be damaged for its tenant, which
no collector can tell."""
READS_AT_ONCE = 4
_UNREADABLE_SAID = 3
TOWERS = "towers"
"""The records of vLLM engines: each names the rows of some tokens, and says nothing more."""
_ROWS = ("objects/", "marks/")


@dataclass(slots=True)
class Collected:
    """What a run did."""

    objects: int = 0
    """Deleted: rows in all their parts, bases, marks and records."""
    bytes: int = 0
    records: int = 0
    """Of the objects: superseded, or too old."""
    waiting_objects: int = 0
    """Found to be garbage, and left for a later run."""
    waiting_bytes: int = 0


@dataclass(slots=True)
class _Found:
    """What a bucket has: of each object its size, and when its last part was put."""

    records: dict[str, NamedRecord]
    named: frozenset[str]
    """Names of the objects that a record names."""
    sizes: dict[str, int] = field(default_factory=dict)
    ages_s: dict[str, float] = field(default_factory=dict)


class Collector:
    """Belongs to one thread at a time."""

    def __init__(
        self,
        bucket: Bucket,
        keys: TenantKeys,
        holds: Holds,
        clock: Callable[[], float] = awake_or_asleep,
    ) -> None:
        """keys: the collector's"""
        self._bucket, self._keys, self._holds, self._clock = bucket, keys, holds, clock
        self._lists = CondemnedLists(bucket, keys)
        self._namings: dict[str, tuple[datetime, Naming]] = {}
        """By place, of the object that was put there then."""

    def run(self, older_than: timedelta | None = None, *, dry_run: bool = False) -> Collected:
        """Delete what may be deleted by now, and condemn what is found to be garbage.

        older_than: condemn records, too, of what nobody put for so long
        dry_run: count what would be deleted or condemned; nothing is
        Raises BucketError."""
        done = Collected()
        with self._holds.held() as hold:
            now = hold.now()
            self._records()  # where one cannot be read nothing is deleted
            if not dry_run:
                for place in read_leases(self._bucket, now).ended:
                    self._bucket.delete(place)
                if not self._sweep(hold, now, done):
                    return done
                self._retire(now)
            found = self._found(now)
            gone = self._leave(found, older_than, now)
            done.records = len(gone)
            if not dry_run:
                self.remove(gone, done)
                found = self._found(now)
            self._condemn(hold, found, done, dry_run)
            if not dry_run:
                self._doom(hold, now)
        return done

    def remove_folder(self, folder: str) -> Collected:
        """Delete all records of a session or base. Raises BucketError."""
        done = Collected()
        self.remove([each.place for each in self._bucket.listing(folder)], done)
        done.records = done.objects
        return done

    def remove(self, places: Collection[str], done: Collected | None = None) -> None:
        """Delete records, now; what only they named is garbage then. Raises BucketError."""
        if not places:
            return
        done = Collected() if done is None else done
        with self._holds.held() as hold:
            id = self._put_list(hold, places)
            began = self._clock()
            for place in places:
                self._delete(place, began, done)
            hold.put(place_of("swept", id), b"")

    # --- phases ---------------------------------------------------------------------------

    def _sweep(self, hold: Hold, now: datetime, done: Collected) -> bool:
        """Delete what was doomed long enough ago; False if that is more than one run may delete: the next one
        continues."""
        began = self._clock()
        phases = read_phases(self._bucket)
        for id, since in sorted(phases.doomed.items()):
            is_due = now - since >= timedelta(seconds=GRACE_S)
            if id in phases.swept or id not in phases.condemned or not is_due:
                continue
            if read_leases(self._bucket, now).hold_back(since, hold.id):
                continue
            doomed = self._lists.read(place_of("doomed", id))
            there = self._rows_there()
            for place in sorted(doomed):
                if place.startswith(_ROWS) and place not in there:
                    continue
                if self._clock() - began > HOLD_S:
                    return False
                self._delete(place, began, done)
            hold.put(place_of("swept", id), b"")
        return True

    def _rows_there(self) -> set[str]:
        """The places of rows and marks that the bucket has."""
        objects = self._bucket.listing("objects", OBJECTS_MAX)
        marks = self._bucket.listing("marks", OBJECTS_MAX)
        return {each.place.rpartition("/")[0] for each in objects} | {each.place for each in marks}

    def _delete(self, place: str, began: float, done: Collected) -> None:
        """Delete one place of a list that had not been swept when the clock said `began`."""
        parts = sorted(self._parts(place), key=lambda part: part.place)
        for each in parts:
            if self._clock() - began > HOLD_S:  # sent now, it may land when the name is used again
                raise BucketError(
                    "The shared tier is slow: what is left is deleted by the next run."
                )
            self._bucket.delete(each.place)
        done.objects += int(bool(parts))
        done.bytes += sum(each.n_bytes for each in parts)

    def _parts(self, place: str) -> list[Listed]:
        if place.startswith("objects/"):
            return self._bucket.listing(place)
        folder = place.rpartition("/")[0]
        if place.startswith("marks/"):
            return [Listed(place, datetime.min)]
        return [each for each in self._bucket.listing(folder, OBJECTS_MAX) if each.place == place]

    def _retire(self, now: datetime) -> None:
        """Remove lists that were swept so long ago that no delete of theirs is still on its way: their names may be
        used again."""
        phases = read_phases(self._bucket)
        limit = timedelta(seconds=LEASE_S)
        for id, since in phases.swept.items():
            if now - since > limit and not self._came_back(id):
                for phase in ("condemned", "known", "doomed", "swept"):
                    self._bucket.delete(place_of(phase, id))
        for phase, begun in (("known", phases.known), ("doomed", phases.doomed)):
            for id, since in begun.items():
                is_lost = id not in phases.condemned and id not in phases.swept
                if is_lost and now - since > limit:  # of a list that is gone
                    self._bucket.delete(place_of(phase, id))

    def _came_back(self, id: str) -> bool:
        """Whether a record of a swept list was put once more by a request that came late: then the list is to be
        swept again."""
        places = self._lists.read(place_of("doomed", id)) or self._lists.read(
            place_of("condemned", id)
        )
        marker = place_of("swept", id)
        if any(self._bucket.has(place) for place in places if not place.startswith(_ROWS)):
            self._bucket.delete(marker)
            return True
        return not self._bucket.has(marker)  # another run saw it, and deletes it now

    def _condemn(self, hold: Hold, found: _Found, done: Collected, dry_run: bool) -> None:
        """Put a list of the garbage that is on none yet."""
        known = self._lists.all()
        garbage = [
            place
            for place in [*found.sizes]
            if found.ages_s[place] >= LEASE_S and self._is_garbage(place, found.named)
        ]
        done.waiting_objects = len(garbage)
        done.waiting_bytes = sum(found.sizes[place] for place in garbage)
        new = [place for place in garbage if place not in known]
        if new and not dry_run:
            self._put_list(hold, sorted(new)[:LIST_MAX])

    def _put_list(self, hold: Hold, places: Iterable[str]) -> str:
        """A new list, known; returns its id."""
        id = secrets.token_hex(16)
        place = place_of("condemned", id)
        hold.put(place, sealed_list(self._keys, place, places))
        hold.put(place_of("known", id), b"")
        return id

    def _doom(self, hold: Hold, now: datetime) -> None:
        """Doom what nothing names of the lists that every writer has seen."""
        began = self._clock()
        phases = read_phases(self._bucket)
        for id in sorted(phases.condemned.keys() - phases.doomed.keys() - phases.swept.keys()):
            if id not in phases.known:  # whoever put it died
                hold.put(place_of("known", id), b"")
            since = phases.known.get(id) or self._bucket.modified(place_of("known", id))
            if read_leases(self._bucket, now).hold_back(since, hold.id):
                continue
            named, _ = self._records()
            condemned = self._lists.read(place_of("condemned", id))
            garbage = [place for place in condemned if self._is_garbage(place, named)]
            doomed = place_of("doomed", id)
            if condemned and self._clock() - began <= HOLD_S:  # or else it may be gone by then
                hold.put(doomed, sealed_list(self._keys, doomed, garbage))

    # --- what there is --------------------------------------------------------------------

    def _found(self, now: datetime) -> _Found:
        """What the bucket has. Raises BucketError, also if it has records that cannot be read."""
        named, records = self._records()
        found = _Found(records, named)
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

    def _records(self) -> tuple[frozenset[str], dict[str, NamedRecord]]:
        """What all records name, and the records."""
        listed = [
            each
            for folder in ("sessions", "bases", TOWERS)
            for each in self._bucket.listing(folder, OBJECTS_MAX)
        ]
        records = {each.place: each for each in named_records(listed)}
        unreadable = [each.place for each in listed if each.place not in records]
        unreadable += self._read(each for each in listed if each.place in records)
        if unreadable:
            some = ", ".join(sorted(unreadable)[:_UNREADABLE_SAID])
            raise BucketError(
                f"The shared tier has {len(unreadable)} records that cannot be read with this key, so nothing that "
                f"they may name is deleted: {some}."
            )
        read = (self._naming(place) for place in records)
        return frozenset(name for each in read if each for name in each.objects), records

    def _naming(self, place: str) -> Naming | None:
        """What an object names; None if it is gone, or cannot be read."""
        return self._namings[place][1] if place in self._namings else None

    def _read(self, listed: Iterable[Listed]) -> list[str]:
        """Read what objects name; returns those of which it cannot be told. One that is gone is passed over."""

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
        unreadable = []
        with ThreadPoolExecutor(READS_AT_ONCE, "towerd-gc") as pool:
            for each, found in zip(new, pool.map(one, new), strict=True):
                self._namings.pop(each.place, None)
                if isinstance(found, Naming):
                    self._namings[each.place] = each.modified, found
                elif found is not None:
                    said = {"object": each.place, "error": str(found)}
                    log.warning("an object of the shared tier cannot be read", extra=said)
                    unreadable.append(each.place)
        return unreadable

    def _is_garbage(self, place: str, named: frozenset[str]) -> bool:
        """Whether nothing needs an object: rows that no record names, a mark of such rows, a record on a list."""
        if place.startswith("objects/"):
            return place.partition("/")[2] not in named
        if place.startswith("marks/"):
            known = self._naming(place)
            return known is None or not named.issuperset(known.objects)
        return True

    # --- records that are needed no more ----------------------------------------------------

    def _leave(self, found: _Found, older_than: timedelta | None, now: datetime) -> list[str]:
        """Records that a later one contains, and all of what nobody put for so long."""
        folders = defaultdict(list)
        for each in found.records.values():
            folders[each.place.rpartition("/")[0]].append(each)
        condemned = self._lists.all()  # after the records: one of these may be about to go
        gone: list[str] = []
        for of in folders.values():
            last = max(each.modified for each in of)
            if older_than is not None and now - last > older_than:
                gone += [each.place for each in of]
            else:
                lasting = [each for each in of if each.place not in condemned]
                gone += self._superseded(lasting)
        return sorted(gone)

    def _superseded(self, records: list[NamedRecord]) -> Iterator[str]:
        """Those of one session or base that a later one of the same model contains."""
        of_model = defaultdict(list)
        for each in records:
            of_model[each.name.model].append(each)
        for of in of_model.values():
            of.sort(key=lambda each: (each.modified, each.place))
            for number, each in enumerate(of):
                later = (self._contains(other, each) for other in of[number + 1 :])
                if sum(later) >= COPIES_MIN:
                    yield each.place

    def _contains(self, later: NamedRecord, each: NamedRecord) -> bool:
        ours, theirs = self._naming(later.place), self._naming(each.place)
        if ours is None or theirs is None:
            return False
        return later.name.n_rows >= each.name.n_rows and ours.contains(theirs)
