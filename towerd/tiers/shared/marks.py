"""Marks: how rows are found by tokens alone.

    marks/NAME    says which objects have the rows of the first N tokens

NAME is a keyed hash of these tokens, so that whoever has the tokens of a prompt asks for it by them. A tower has
marks at each multiple of 256, put in ascending order: the furthest is found by asking for a few at once, some
rounds for any length. It has one at its end, too: by that, who puts a tower that continues it knows what is in the bucket.
The first tower that passes through some tokens makes their mark, and others leave it: their records say which marks
they pass through, and whoever collects puts those again that went with the first one.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from towerd.slots.errors import StateError
from towerd.tiers.shared.bucket import Bucket, ObjectMissing
from towerd.tiers.shared.deleting.leases import Hold
from towerd.tiers.shared.naming import (
    MarkedWay,
    PassedMark,
    behind_any_naming,
    naming,
    with_naming,
)
from towerd.tiers.shared.objects import (
    VERSION,
    BasisPlace,
    CheckpointPlace,
    PutRows,
    RowsPlace,
    encode,
)
from towerd.tiers.shared.sealing import TenantKeys
from towerd.tokens import ID_BYTES

MARK_TOKENS = 256
_BYTES_MAX = 1 << 24
_ASKED = 4
"""Marks that are asked for at once, to find the last one that is there."""


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """What the object of a mark holds."""

    version: int
    rows: list[RowsPlace]
    """Consecutive, from the first token on; they may reach beyond the mark."""
    transform_bases: list[BasisPlace]
    checkpoints: list[CheckpointPlace] = []


@dataclass(frozen=True, slots=True)
class FoundMark:
    """A mark of the first `n_tokens` tokens of a prompt."""

    n_tokens: int
    put: PutRows
    """They may be of more tokens, which need not be the prompt's."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one model's rows in a bucket. Every method raises BucketError."""

    bucket: Bucket
    collector: TenantKeys
    model: tuple[bytes, ...]
    """What tells these rows from others: row identity, adapters, fidelity."""

    def put(self, hold: Hold, keys: TenantKeys, ids: bytes, put: PutRows) -> int:
        """Put the marks that are missing of `ids`, whose rows are in the bucket, and one at their end; returns the
        bytes sent."""
        n = len(ids) // ID_BYTES
        first = self._furthest(keys, ids, 1, n // MARK_TOKENS) + 1
        ends = [*range(first * MARK_TOKENS, n + 1, MARK_TOKENS), n]
        return sum(self._put(hold, keys, ids, n_tokens, put) for n_tokens in ends)

    def _put(self, hold: Hold, keys: TenantKeys, ids: bytes, n_tokens: int, put: PutRows) -> int:
        place = self._place(keys, ids, n_tokens)
        if hold.has(place):
            return 0
        near = _near(put, n_tokens)
        needed = [each for each in near.rows if each.p0 < n_tokens]
        states = near.checkpoints[-1:] or ([] if needed else put.checkpoints[:1])
        objects = PutRows(
            needed, near.transform_bases, states
        ).objects  # one that names nothing would stay for ever
        mark = encode(Mark(VERSION, near.rows, near.transform_bases, near.checkpoints))
        sealed = with_naming(self.collector, keys, place, naming(objects), mark)
        if len(sealed) > _BYTES_MAX:
            return 0  # none could read it
        return len(sealed) if hold.put(place, sealed) else 0

    def way(self, keys: TenantKeys, ids: bytes, put: PutRows) -> MarkedWay | None:
        """All marks of `ids`, whose rows are in the bucket, for their record; None if they would take too much."""
        n = len(ids) // ID_BYTES
        ends = sorted({*range(MARK_TOKENS, n + 1, MARK_TOKENS), n})
        marks = [
            PassedMark(
                bytes.fromhex(self._name(keys, ids, end)),
                sum(each.p0 < end for each in put.rows),
                max(
                    int(not put.rows),
                    sum(each.position < end + MARK_TOKENS for each in put.checkpoints),
                ),
            )
            for end in ends
        ]
        data = encode(Mark(VERSION, put.rows, put.transform_bases, put.checkpoints))
        if len(data) > _BYTES_MAX // 2:
            return None  # no reader could take one
        last = marks[-1].place
        bases, states = put.transform_bases, put.checkpoints
        return MarkedWay(
            keys.seal(last, data),
            [each.name for each in put.rows],
            [each.name for each in bases],
            [each.name for each in states],
            marks,
        )

    def find(self, keys: TenantKeys, ids: bytes, n_known: int) -> FoundMark | None:
        """The furthest mark on the way of `ids` at a multiple of MARK_TOKENS; None if there is none beyond `n_known`
        tokens. Raises StateError for one that is damaged."""
        first, last = n_known // MARK_TOKENS + 1, len(ids) // ID_BYTES // MARK_TOKENS
        number = self._furthest(keys, ids, first, last)
        return None if number < first else self.at(keys, ids, number * MARK_TOKENS)

    def at(self, keys: TenantKeys, ids: bytes, n_tokens: int) -> FoundMark | None:
        """The mark of the first `n_tokens` tokens of `ids`, if there is one. Raises StateError for one that is
        damaged."""
        place = self._place(keys, ids, n_tokens)
        try:
            found = self.bucket.get(place, _BYTES_MAX)
            data = behind_any_naming(self.collector, keys, place, found)
        except ObjectMissing:
            return None
        try:
            mark = msgspec.msgpack.decode(data, type=Mark)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise StateError(f"the mark cannot be read: {error}") from error
        if mark.version != VERSION:
            raise StateError(f"the mark has version {mark.version}; this towerd reads {VERSION}")
        put = PutRows(mark.rows, mark.transform_bases, mark.checkpoints)
        return FoundMark(n_tokens, _near(put, n_tokens))

    def _furthest(self, keys: TenantKeys, ids: bytes, first: int, last: int) -> int:
        """The number of the last mark of those from `first` to `last`; first - 1 if there is none of them."""
        low, high = first - 1, last + 1  # low is there, high is not
        asked = {first, last}
        while low + 1 < high:
            numbers = sorted(asked)
            places = [self._place(keys, ids, number * MARK_TOKENS) for number in numbers]
            there = dict(zip(numbers, self.bucket.has_each(places), strict=True))
            low = max([low, *(number for number in numbers if there[number])])  # there may be holes
            high = min([high, *(each for each in numbers if each > low)])
            between = ((high - low) * part // (_ASKED + 1) for part in range(1, _ASKED + 1))
            asked = {low + each for each in between if each}
        return low

    def _place(self, keys: TenantKeys, ids: bytes, n_tokens: int) -> str:
        return f"marks/{self._name(keys, ids, n_tokens)}"

    def _name(self, keys: TenantKeys, ids: bytes, n_tokens: int) -> str:
        return keys.name("mark", *self.model, ids[: n_tokens * ID_BYTES])


def _near(put: PutRows, n_tokens: int) -> PutRows:
    """What begins less than a mark's width behind `n_tokens` tokens."""
    end = n_tokens + MARK_TOKENS
    rows = [each for each in put.rows if each.p0 < end]
    states = [each for each in put.checkpoints if each.position < end]
    return PutRows(rows, put.transform_bases, states)
