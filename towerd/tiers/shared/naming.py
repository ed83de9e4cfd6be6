"""Naming: what a record or a mark needs of the bucket, readable for every daemon of the key file.

    u32 length | sealed for the collector: names of objects, digests of turns | sealed for the tenant

So a daemon that knows none of a bucket's tenants can tell what is garbage, put a mark again that went with another
tower, and not read what anyone's texts say.
"""

from __future__ import annotations

import hashlib
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
RECORD_BYTES_MAX = 1 << 27
"""Of what is sealed for the tenant."""
_LENGTH = struct.Struct("<I")


class PassedMark(msgspec.Struct, frozen=True, array_like=True):
    """A mark that a record's tower passes through, and how much of its way the mark is of no use without."""

    name: bytes
    n_rows: int
    """Objects with rows, the first ones."""
    n_states: int
    """State checkpoints up to there; the last of these."""

    @property
    def place(self) -> str:
        """Of its object."""
        return f"marks/{self.name.hex()}"


class MarkedWay(msgspec.Struct, frozen=True, array_like=True):
    """The marks of a record's tower, so that one which is missing can be put again without the tenant's key."""

    mark: bytes
    """Sealed for the tenant and the place of the last one; the same for all of them."""
    rows: list[str]
    """Names of objects, in the order of their rows."""
    bases: list[str]
    states: list[str]
    marks: list[PassedMark]
    """Ascending."""


class Naming(msgspec.Struct, frozen=True, array_like=True):
    """What one record or mark names."""

    version: int
    objects: list[str]
    """Without them it is of no use."""
    turns: list[bytes] = []
    """Digests of what a record says; empty: not known."""
    branch: list[bytes] = []
    """Those of what its rows are of."""
    states: list[bytes] = []
    """Of each state checkpoint among the objects: a digest of the tokens that it has seen."""
    way: MarkedWay | None = None
    """Of a record: its tower's marks."""
    digest: bytes = b""
    """Of a record: BLAKE2b-256 of what is sealed for the tenant; none in records of older versions."""
    sealed_for: str = ""
    """Of a mark: the place that its tenant's part is sealed for, unless it is its own."""

    def contains(self, other: Naming) -> bool:
        """Whether a record that names this says all that another one does, has its state checkpoints, and rows that
        continue its rows or are the same."""
        has_rows = {*other.branch} <= {*self.branch} or {*other.objects} <= {*self.objects}
        has_all = {*other.turns} <= {*self.turns} and {*other.states} <= {*self.states}
        return bool(other.turns) and has_all and has_rows


def naming(
    objects: Iterable[str],
    turns: Iterable[bytes] = (),
    branch: Iterable[bytes] = (),
    states: Iterable[bytes] = (),
    way: MarkedWay | None = None,
) -> Naming:
    """In one order, whatever order they come in."""
    of_turns, of_branch, of_states = (sorted(set(each)) for each in (turns, branch, states))
    return Naming(VERSION, sorted(set(objects)), of_turns, of_branch, of_states, way)


def with_naming(
    collector: TenantKeys, keys: TenantKeys, place: str, named: Naming, data: bytes
) -> bytes:
    """The bytes of the object at `place`."""
    sealed = keys.seal(place, data)
    return _joined(collector, place, msgspec.structs.replace(named, digest=_digest(sealed)), sealed)


def needed_by(way: MarkedWay, mark: PassedMark) -> list[str]:
    """The names of the objects that a mark of a record's tower is of no use without."""
    state = way.states[: mark.n_states][-1:]
    return sorted({*way.rows[: mark.n_rows], *way.bases, *state})


def mark_again(collector: TenantKeys, way: MarkedWay, mark: PassedMark) -> bytes:
    """The bytes of a mark of a record's tower."""
    named = Naming(VERSION, needed_by(way, mark), sealed_for=way.marks[-1].place)
    return _joined(collector, mark.place, named, way.mark)


def behind_naming(keys: TenantKeys, place: str, data: bytes | memoryview) -> bytes:
    """What is sealed for the tenant; the first version of the protocol had nothing before it. Raises StateError."""
    if is_unnamed(data):
        return keys.unseal(place, data)
    return keys.unseal(place, _parts(data)[1])


def behind_any_naming(
    collector: TenantKeys, keys: TenantKeys, place: str, data: bytes | memoryview
) -> bytes:
    """The same of a mark, which whoever collects may have put again. Raises StateError."""
    if is_unnamed(data):
        return keys.unseal(place, data)
    first, sealed = _parts(data)
    return keys.unseal(_opened(collector, place, first).sealed_for or place, sealed)


def is_unnamed(data: bytes | memoryview) -> bool:
    """Whether an object was put by the first version of the protocol: it does not say what it names."""
    return data[: len(MAGIC)] == MAGIC


def is_whole(named: Naming, data: bytes | memoryview) -> bool:
    """Whether the tenant's part of a record is what its writer sealed; False if that cannot be told."""
    return bool(named.digest) and _digest(_parts(data)[1]) == named.digest


def read_naming(bucket: Bucket, collector: TenantKeys, place: str) -> Naming:
    """What the object at `place` names. Raises BucketError, ObjectMissing; StateError if it cannot be told."""
    data = bucket.start_of(place, START_BYTES)
    if is_unnamed(data):
        raise StateError("an older towerd put it, and it does not say what it names")
    if len(data) < _LENGTH.size:
        raise StateError("it is too short")
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    if end > NAMING_BYTES_MAX:
        raise StateError("it is damaged, or was put by another version of towerd")
    if end > len(data):
        data = bucket.start_of(place, end)
    return _opened(collector, place, data[_LENGTH.size : end])


def _opened(collector: TenantKeys, place: str, sealed: bytes | memoryview) -> Naming:
    try:
        plain = collector.unseal(_place(place), sealed)
        found = msgspec.msgpack.decode(plain, type=Naming)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StateError(f"it cannot be read: {error}") from error
    if found.version != VERSION:
        raise StateError(f"it has version {found.version}; this towerd reads {VERSION}")
    return found


def _joined(collector: TenantKeys, place: str, named: Naming, sealed: bytes) -> bytes:
    first = collector.seal(_place(place), msgspec.msgpack.encode(named))
    return _LENGTH.pack(len(first)) + first + sealed


def _parts(data: bytes | memoryview) -> tuple[bytes | memoryview, bytes | memoryview]:
    """What is sealed for the collector, and for the tenant."""
    start = _LENGTH.size + (_LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0)
    return data[_LENGTH.size : start], data[start:]


def _digest(sealed: bytes | memoryview) -> bytes:
    return hashlib.blake2b(sealed, digest_size=32).digest()


def _place(place: str) -> str:
    return f"{place} names"
