"""Naming: what a record or a mark needs of the bucket, readable for every daemon of the key file.

    u32 length | sealed for the collector: names of objects, digests of turns | sealed for the tenant

So a daemon that knows none of a bucket's tenants can tell what is garbage, and not what anyone's texts say.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec

from towerd.slots.errors import StateError
from towerd.tiers.shared.bucket import Bucket
from towerd.tiers.shared.sealing import MAGIC, TenantKeys

VERSION = 1
START_BYTES = 1 << 14
"""What is read of an object first; most need no more."""
NAMING_BYTES_MAX = 1 << 24
_LENGTH = struct.Struct("<I")


class Naming(msgspec.Struct, frozen=True, array_like=True):
    """What one record or mark names."""

    version: int
    objects: list[str]
    """Without them it is of no use."""
    turns: list[bytes] = []
    """Digests of what a record says; empty: not known."""
    branch: list[bytes] = []
    """Those of what its rows are of."""

    def contains(self, other: Naming) -> bool:
        """Whether a record that names this says all that another one does, of rows that continue its rows or are the
        same."""
        has_rows = {*other.branch} <= {*self.branch} or {*other.objects} <= {*self.objects}
        return bool(other.turns) and {*other.turns} <= {*self.turns} and has_rows


def naming(
    objects: Iterable[str], turns: Iterable[bytes] = (), branch: Iterable[bytes] = ()
) -> Naming:
    """In one order, whatever order they come in."""
    return Naming(VERSION, sorted(set(objects)), sorted(set(turns)), sorted(set(branch)))


def with_naming(
    collector: TenantKeys, keys: TenantKeys, place: str, named: Naming, data: bytes
) -> bytes:
    """The bytes of the object at `place`."""
    first = collector.seal(_place(place), msgspec.msgpack.encode(named))
    return _LENGTH.pack(len(first)) + first + keys.seal(place, data)


def behind_naming(keys: TenantKeys, place: str, data: bytes | memoryview) -> bytes:
    """What is sealed for the tenant; the first version of the protocol had nothing before it. Raises StateError."""
    if data[: len(MAGIC)] == MAGIC:
        return keys.unseal(place, data)
    start = _LENGTH.size + (_LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0)
    return keys.unseal(place, data[start:])


def read_naming(bucket: Bucket, collector: TenantKeys, place: str) -> Naming:
    """What the object at `place` names. Raises BucketError, ObjectMissing; StateError if it cannot be told."""
    data = bucket.start_of(place, START_BYTES)
    if len(data) < _LENGTH.size:
        raise StateError("it is too short")
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    if end > NAMING_BYTES_MAX:
        raise StateError("it is damaged, or was put by another version of towerd")
    if end > len(data):
        data = bucket.start_of(place, end)
    try:
        plain = collector.unseal(_place(place), data[_LENGTH.size : end])
        found = msgspec.msgpack.decode(plain, type=Naming)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StateError(f"it cannot be read: {error}") from error
    if found.version != VERSION:
        raise StateError(f"it has version {found.version}; this towerd reads {VERSION}")
    return found


def _place(place: str) -> str:
    return f"{place} names"
