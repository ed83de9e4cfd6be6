"""Collector: deletes from a bucket what no record names. docs/shared.md has the protocol, and why nobody loses a race.

A run takes each list of `condemned.py` one phase further. Any number of runs may go at once, and end anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from towerd.tiers.shared.bucket import Bucket, BucketError, Listed
from towerd.tiers.shared.deleting.condemned import (
    LIST_MAX,
    CondemnedLists,
    ListUnreadable,
    place_of,
)
from towerd.tiers.shared.deleting.leases import (
    GRACE_S,
    HOLD_S,
    LEASE_S,
    Hold,
    Holds,
    awake_or_asleep,
    read_leases,
)
from towerd.tiers.shared.deleting.superseded import needed_no_more
from towerd.tiers.shared.deleting.survey import OBJECTS_MAX, Contents, Survey
from towerd.tiers.shared.naming import mark_again, needed_by
from towerd.tiers.shared.sealing import TenantKeys

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
    """Contents to be garbage, and left for a later run."""
    waiting_bytes: int = 0
    marks: int = 0
    """Put again: those of living records that had gone with another one."""
    passed_over: list[str] = field(default_factory=list)
    """Places of lists of what is deleted that cannot be read, and hold back nothing."""


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
        self._bucket, self._holds, self._clock = bucket, holds, clock
        self._keys = keys
        self._lists = CondemnedLists(bucket, keys)
        self._survey = Survey(bucket, keys)

    def run(self, older_than: timedelta | None = None, *, dry_run: bool = False) -> Collected:
        """Delete what may be deleted by now, and condemn what is found to be garbage.

        older_than: condemn records, too, of what nobody put for so long
        dry_run: count what would be deleted or condemned; nothing is
        Raises BucketError."""
        done = Collected()
        with self._holds.held() as hold:
            now = hold.now()
            self._survey.records()  # where one cannot be read nothing is deleted
            if not dry_run:
                for place in read_leases(self._bucket, now).ended:
                    self._bucket.delete(place)
                if not self._sweep(hold, now, done):
                    return done
                self._retire(now)
            found = self._survey.found(now)
            condemned = self._lists.all(hold.now)
            gone = needed_no_more(self._survey, found.records.values(), condemned, older_than, now)
            done.records = len(gone)
            if not dry_run:
                self.remove(gone, done)
                found = self._survey.found(now)
            began = self._clock()
            self._condemn(hold, found, done, None if dry_run else began)
            if not dry_run:
                self._put_marks(hold, found, done, began)
                self._doom(hold, now)
            done.passed_over = self._lists.passed_over
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
        phases = self._lists.phases()
        for id, since in sorted(phases.doomed.items()):
            is_due = now - since >= timedelta(seconds=GRACE_S)
            if id in phases.swept or id not in phases.condemned or not is_due:
                continue
            if read_leases(self._bucket, now).hold_back(since, hold.id):
                continue
            doomed = self._doomed(id)
            if doomed is None:
                continue
            there = self._rows_there()
            for place in sorted(doomed):
                if place.startswith(_ROWS) and place not in there:
                    continue
                if self._clock() - began > HOLD_S:
                    return False
                self._delete(place, began, done)
            hold.put(place_of("swept", id), b"")
        return True

    def _doomed(self, id: str) -> frozenset[str] | None:
        """A doomed list; None if it was damaged: then it is doomed again, by what was condemned. Raises BucketError."""
        place = place_of("doomed", id)
        try:
            return self._lists.read(place)
        except ListUnreadable:
            if not self._lists.is_own(id):
                return None
            self._lists.read(place_of("condemned", id))  # raises if neither can be read
            self._bucket.delete(place)
            return None

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
        phases = self._lists.phases()
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
        places = self._read_any("doomed", id) or self._read_any("condemned", id)
        marker = place_of("swept", id)
        if any(self._bucket.has(place) for place in places if not place.startswith(_ROWS)):
            self._bucket.delete(marker)
            return True
        return not self._bucket.has(marker)  # another run saw it, and deletes it now

    def _read_any(self, phase: str, id: str) -> frozenset[str]:
        """A list, nothing of one that cannot be read. Raises BucketError."""
        try:
            return self._lists.read(place_of(phase, id))
        except ListUnreadable:
            return frozenset()

    def _condemn(self, hold: Hold, found: Contents, done: Collected, began: float | None) -> None:
        """Put lists of the garbage that is on none yet. began: when what is there was listed; None: only count"""
        known = self._lists.all(hold.now)
        garbage = [
            place
            for place in [*found.sizes]
            if found.ages_s[place] >= LEASE_S and self._survey.is_garbage(place, found.named)
        ]
        done.waiting_objects = len(garbage)
        done.waiting_bytes = sum(found.sizes[place] for place in garbage)
        new = sorted(place for place in garbage if place not in known)
        for start in range(0, len(new), LIST_MAX):
            if began is not None and self._clock() - began <= HOLD_S:
                self._put_list(hold, new[start : start + LIST_MAX])

    def _put_marks(self, hold: Hold, found: Contents, done: Collected, began: float) -> None:
        """Put the marks that records pass through and the bucket lacks: those of a tower with the same beginning
        that was deleted."""
        for record in found.records:
            named = self._survey.naming(record)
            if named is None or named.way is None or hold.is_condemned(record):
                continue
            for mark in named.way.marks:
                if mark.place in found.sizes or hold.is_condemned(mark.place):
                    continue
                if not all(f"objects/{each}" in found.sizes for each in needed_by(named.way, mark)):
                    continue  # it would lead to nothing, and take the place of another tower's
                if self._clock() - began > HOLD_S:
                    return  # the next run continues
                done.marks += hold.put(mark.place, mark_again(self._keys, named.way, mark))
                found.sizes[mark.place] = 0

    def _put_list(self, hold: Hold, places: Iterable[str]) -> str:
        """A new list, known; returns its id."""
        id = self._lists.new_id()
        place = place_of("condemned", id)
        hold.put(place, self._lists.sealed(place, places))
        hold.put(place_of("known", id), b"")
        return id

    def _doom(self, hold: Hold, now: datetime) -> None:
        """Doom what nothing names of the lists that every writer has seen."""
        began = self._clock()
        phases = self._lists.phases()
        for id in sorted(phases.condemned.keys() - phases.doomed.keys() - phases.swept.keys()):
            if id not in phases.known:  # whoever put it died
                hold.put(place_of("known", id), b"")
            since = phases.known.get(id) or self._bucket.modified(place_of("known", id))
            if read_leases(self._bucket, now).hold_back(since, hold.id):
                continue
            named, _ = self._survey.records()
            try:
                condemned = self._lists.read_again(place_of("condemned", id))
            except ListUnreadable:
                continue  # nothing of it is doomed, so nothing is deleted
            garbage = [place for place in condemned if self._survey.is_garbage(place, named)]
            doomed = place_of("doomed", id)
            if condemned and self._clock() - began <= HOLD_S:  # or else it may be gone by then
                hold.put(doomed, self._lists.sealed(doomed, garbage))
