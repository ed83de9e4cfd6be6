"""Marks: how rows are found by tokens alone.

    marks/NAME    says which objects have the rows of the first N tokens, N a multiple of 256

NAME is a keyed hash of these tokens, so that whoever has the tokens of a prompt asks for it by them. A tower has
marks at each multiple, put in ascending order: the furthest is found by halving, a few requests for any length.
The first tower that passes through some tokens makes their mark, and others leave it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from towerd.slots.errors import StateError
from towerd.tiers.shared.bucket import Bucket, ObjectMissing
from towerd.tiers.shared.objects import VERSION, BasisPlace, PutRows, RowsPlace, encode
from towerd.tiers.shared.sealing import TenantKeys
from towerd.tokens import ID_BYTES

MARK_TOKENS = 256
_BYTES_MAX = 1 << 24


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """What the object of a mark holds."""

    version: int
    rows: list[RowsPlace]
    """Consecutive, from the first token on; they may reach beyond the mark."""
    transform_bases: list[BasisPlace]


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one model's rows in a bucket. Every method raises BucketError."""

    bucket: Bucket
    model: tuple[bytes, ...]
    """What tells these rows from others: row identity, adapters, whether all are exact."""

    def put(self, keys: TenantKeys, ids: bytes, put: PutRows) -> int:
        """Put the marks that are missing of `ids`, whose rows are in the bucket; returns the bytes sent."""
        sent, last = 0, len(ids) // ID_BYTES // MARK_TOKENS
        for number in range(self._furthest(keys, ids, 1, last) + 1, last + 1):
            end = (number + 1) * MARK_TOKENS
            rows = [place for place in put.rows if place.p0 < end]
            place = self._place(keys, ids, number)
            sealed = keys.seal(place, encode(Mark(VERSION, rows, put.transform_bases)))
            if self.bucket.put(place, sealed):
                sent += len(sealed)
        return sent

    def find(self, keys: TenantKeys, ids: bytes, n_known: int) -> PutRows | None:
        """The rows of the furthest mark on the way of `ids`; None if there is none beyond `n_known` tokens. Raises
        StateError for one that is damaged."""
        first, last = n_known // MARK_TOKENS + 1, len(ids) // ID_BYTES // MARK_TOKENS
        number = self._furthest(keys, ids, first, last)
        if number < first:
            return None
        place = self._place(keys, ids, number)
        try:
            data = keys.unseal(place, self.bucket.get(place, _BYTES_MAX))
        except ObjectMissing:
            return None
        try:
            mark = msgspec.msgpack.decode(data, type=Mark)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise StateError(f"the mark cannot be read: {error}") from error
        if mark.version != VERSION:
            raise StateError(f"the mark has version {mark.version}; this towerd reads {VERSION}")
        return PutRows(mark.rows, mark.transform_bases)

    def _furthest(self, keys: TenantKeys, ids: bytes, first: int, last: int) -> int:
        """The number of the last mark of those from `first` to `last`; first - 1 if there is none of them."""
        low, high, step = first - 1, last + 1, 1  # low is there, high is not
        while low + 1 < high:
            number = min(low + step, high - 1) if step else (low + high) // 2
            if self.bucket.has(self._place(keys, ids, number)):
                low, step = number, 2 * step
            else:
                high, step = number, 0
        return low

    def _place(self, keys: TenantKeys, ids: bytes, number: int) -> str:
        prefix = ids[: number * MARK_TOKENS * ID_BYTES]
        return f"marks/{keys.name('mark', *self.model, prefix)}"
