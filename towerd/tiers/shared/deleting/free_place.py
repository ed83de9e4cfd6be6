"""Where to put a record, while others of its session or base may be about to go."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

from towerd.tiers.shared.bucket import Listed
from towerd.tiers.shared.deleting.leases import Hold
from towerd.tiers.shared.records import RecordName

AGAIN = timedelta(days=1)
"""A record that is older is put again."""


def free_place(
    hold: Hold, listed: Iterable[Listed], folder: str, name: RecordName
) -> tuple[str, bool]:
    """Where to put a record, and whether it is there, put in the last day: the same record is put again each day, so
    that what is in use is never old, and as another object while it is being deleted. Raises BucketError."""
    there, number, place = {each.place: each.modified for each in listed}, 0, f"{folder}/{name}"
    while hold.is_condemned(place) or place in there:
        if not hold.is_condemned(place) and hold.now() - there[place] < AGAIN:
            return place, True
        number += 1
        content = hashlib.sha256(f"{name.content} {number}".encode()).hexdigest()
        place = f"{folder}/{replace(name, content=content)}"
    return place, False
