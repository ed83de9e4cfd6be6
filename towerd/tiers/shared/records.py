"""Names of records, and which of several is taken.

Several daemons put records of one session or base: after other turns, of changed texts, with rows of other
models or with none. A record's name says what it is of, so that the one to take is known from a listing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from towerd.tiers.shared.bucket import Listed
from towerd.tiers.shared.sealing import TenantKeys

TOWERS = "towers"
"""The folder of the records of vLLM engines: each names the rows of some tokens, and says nothing more."""
_DIGITS = 16
_NAME = re.compile(r"(\d{6,12})-([0-9a-f]{16})-([0-9a-f]{16})-(\d{9})-([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class RecordName:
    """What a record is of."""

    version: int
    """Turns of a session; number of a base's text, ascending."""
    text: str
    """16 hex digits, keyed: equal for equal tokens."""
    model: str
    """16 hex digits, keyed: equal for rows that the same daemons find."""
    n_rows: int
    """Tokens with rows in the bucket."""
    content: str
    """Keyed hash of the record, and of how often it was put."""

    def __str__(self) -> str:
        """The last part of its place."""
        of = f"{self.version:06d}-{self.text}-{self.model}"
        return f"{of}-{self.n_rows:09d}-{self.content}"


@dataclass(frozen=True, slots=True)
class NamedRecord:
    """A record of a listing."""

    name: RecordName
    place: str
    modified: datetime


def short_name(keys: TenantKeys, kind: str, *parts: bytes) -> str:
    """16 hex digits, for a part of a record's name."""
    return keys.name(kind, *parts)[:_DIGITS]


def named_records(listed: Iterable[Listed]) -> list[NamedRecord]:
    """The records of a listing. Other objects are left out."""
    return [each for each in map(_named, listed) if each is not None]


def best_first(listed: Iterable[Listed], model: str) -> list[NamedRecord]:
    """The records of a listing: the highest version first; of one version the text that was put last; of one text
    those with rows of `model`, those with the most rows, and the latest. Other objects are left out."""
    found = named_records(listed)
    last: dict[tuple[int, str], datetime] = {}
    for each in found:
        which = each.name.version, each.name.text
        last[which] = max(each.modified, last.get(which, each.modified))

    def rank(each: NamedRecord) -> tuple[object, ...]:
        name = each.name
        text = name.version, last[name.version, name.text], name.text
        return *text, name.model == model, name.n_rows, each.modified

    return sorted(found, key=rank, reverse=True)


def version_of(text: str, found: list[NamedRecord], *, is_newest: bool) -> int:
    """The version to put a base's text as: a new one for a text that is not there; also for one that is not the
    newest there, if it is to be.

    found: best first"""
    newest = found[0].name if found else None
    known = [each.name.version for each in found if each.name.text == text]
    if newest is None:
        return 1
    if not known or (is_newest and newest.text != text):
        return newest.version + 1
    return max(known)


def _named(listed: Listed) -> NamedRecord | None:
    parts = _NAME.fullmatch(listed.place.rpartition("/")[2])
    if parts is None:
        return None
    version, text, model, n_rows, content = parts.groups()
    name = RecordName(int(version), text, model, int(n_rows), content)
    return NamedRecord(name, listed.place, listed.modified)
