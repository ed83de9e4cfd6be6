"""Heads: the records of a session that no other one contains.

Each record names those that were there when it was put and whose turns it has. So the heads are found from a
listing by reading hardly more than the heads: one, unless machines put at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from towerd.errors import TowerdError
from towerd.slots.errors import StateError
from towerd.tiers.shared.bucket import BucketError, ObjectDamaged, ObjectMissing
from towerd.tiers.shared.objects import SessionRecord
from towerd.tiers.shared.records import NamedRecord

HEADS_MAX = 32
"""What is put contains so many, and the next one the others."""
_DAMAGED_MAX = 8
"""After so many records that cannot be read no more are tried."""


@dataclass(slots=True)
class Head:
    """A record that no other one contains."""

    text: str
    record: SessionRecord


@dataclass(slots=True)
class Heads:
    """Those of one session, the one with the most turns first."""

    found: list[Head] = field(default_factory=list)
    problem: TowerdError | None = None
    """Of the first record that cannot be read."""


def read_heads(listed: Sequence[NamedRecord], read: Callable[[str], SessionRecord]) -> Heads:
    """The heads of a listing, best first. read: the record of a place; raises ObjectDamaged, ObjectMissing or
    StateError for one that cannot be used. Raises BucketError."""
    heads, contained, n_damaged = Heads(), set[str](), 0
    for each in listed:
        text = each.name.text
        if text in contained:
            continue
        try:
            record = read(each.place)
        except (ObjectDamaged, ObjectMissing, StateError) as error:
            problem = BucketError(f"A record of the session cannot be used: {error}.")
            heads.problem = heads.problem or (error if isinstance(error, TowerdError) else problem)
            n_damaged += 1
        else:
            heads.found.append(Head(text, record))
            contained |= {text, *record.contains}
        if n_damaged == _DAMAGED_MAX or len(heads.found) == HEADS_MAX:
            break
    return heads
