"""Marks: how rows are found by tokens alone.

    marks/NAME    says which objects have the rows of the first N tokens

NAME is a keyed hash of these tokens, so that whoever has the tokens of a prompt asks for it by them. A tower has
marks at each multiple of 256, put in ascending order: the furthest is found by asking for a few at once, some
rounds for any length. It has one at its end, too: by that, who puts a tower that continues it knows what is in the bucket.
The first tower that passes through some tokens makes their mark, and others leave it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from towerd.slots.errors import StateError
from towerd.tiers.shared.bucket import Bucket, ObjectMissing
from towerd.tiers.shared.leases import Hold
from towerd.tiers.shared.naming import behind_naming, naming, with_naming
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
        last = len(ids) // ID_BYTES // MARK_TOKENS
        first = self._furthest(keys, ids, 1, last) + 1
        ends = [*(n * MARK_TOKENS for n in range(first, last + 1)), len(ids) // ID_BYTES]
        return sum(self._put(hold, keys, ids, n_tokens, put) for n_tokens in ends)

    def _put(self, hold: Hold, keys: TenantKeys, ids: bytes, n_tokens: int, put: PutRows) -> int:
        place = self._place(keys, ids, n_tokens)
        if hold.has(place):
            return 0
        rows = [each for each in put.rows if each.p0 < n_tokens + MARK_TOKENS]
        states = [each for each in put.checkpoints if each.position < n_tokens + MARK_TOKENS]
        needed = [each for each in rows if each.p0 < n_tokens]
        objects = PutRows(needed, put.transform_bases, states[-1:]).objects
        mark = encode(Mark(VERSION, rows, put.transform_bases, states))
        sealed = with_naming(self.collector, keys, place, naming(objects), mark)
        if len(sealed) > _BYTES_MAX:
            return 0  # none could read it
        return len(sealed) if hold.put(place, sealed) else 0

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
            data = behind_naming(keys, place, self.bucket.get(place, _BYTES_MAX))
        except ObjectMissing:
            return None
        try:
            mark = msgspec.msgpack.decode(data, type=Mark)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise StateError(f"the mark cannot be read: {error}") from error
        if mark.version != VERSION:
            raise StateError(f"the mark has version {mark.version}; this towerd reads {VERSION}")
        return FoundMark(n_tokens, PutRows(mark.rows, mark.transform_bases, mark.checkpoints))

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
        return f"marks/{keys.name('mark', *self.model, ids[: n_tokens * ID_BYTES])}"
