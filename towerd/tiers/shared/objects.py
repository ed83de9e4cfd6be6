"""What objects hold: rows of segments in parts, transform bases, and the records of sessions and bases.

    objects/NAME/0000, 0001, ...    bytes in parts of 4 MiB, each sealed by itself
    marks/NAME                      see `marks.py`
    sessions/NAME/TURNS-CONTENT     a record: a session as it was after so many turns
    bases/NAME/CONTENT              a record: a precached prompt

The bytes of rows are

    u32 length of the header | header (msgpack) | data, as in the segment file behind its own header

The header has what the rows are of, which is compared before they are used, and the checksums of every
piece. An object is named by a keyed hash of its header: what differs in anything has another name, so
that parts of two writers never mix. While that name is being deleted, the object is put as NAME-1, NAME-2, ...
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from towerd.slots.errors import StateError
from towerd.store.segments.segment_header import (
    HeadEntry,
    RunEntry,
    SegmentHeader,
    segment_key,
)
from towerd.tiers.shared.bucket import Bucket, ObjectMissing
from towerd.tiers.shared.deleting.leases import Hold
from towerd.tiers.shared.sealing import SEAL_BYTES, TenantKeys
from towerd.tokens import ID_BYTES

VERSION = 1
PART_BYTES = 1 << 22
"""Bytes of one part, sealed as one: what a slow line sends well before a request times out."""
AHEAD_PARTS = 4
"""Parts that are fetched and opened at once; each takes its size twice in memory."""
_LENGTH = struct.Struct("<I")
R = TypeVar("R", bound="Record")


class RowsHeader(msgspec.Struct, frozen=True, array_like=True):
    """What the rows of an object are of."""

    row_identity: bytes
    adapters: str
    """Those that the rows were computed under; see `towerd.store.tree.scope`."""
    chain: bytes
    """BLAKE2b-256 of row identity, adapters and every token id up to the last row."""
    p0: int
    p1: int
    ids: bytes
    """int32 LE, p1 - p0 of them."""
    n_bytes: int
    """Of the data."""
    digest: bytes
    """BLAKE2b-256 of the data: with other bytes they are another object."""
    runs: list[RunEntry]
    head: HeadEntry | None = None

    @classmethod
    def of(
        cls, header: SegmentHeader, adapters: str, before: bytes, data: memoryview
    ) -> RowsHeader:
        """That of a segment file. before: the ids in front of its first row; data: those behind its header"""
        chain = segment_key(header.row_identity, adapters, before + header.ids)
        digest = hashlib.blake2b(data, digest_size=32).digest()
        place = header.p0, header.p1, header.ids, len(data), digest
        return cls(header.row_identity, adapters, chain, *place, header.runs, header.head)

    def as_segment(
        self, row_identity: bytes, scope: str, adapters: str, ids: bytes
    ) -> SegmentHeader:
        """The header of a segment file of `scope` with these rows, for a path that begins with `ids`. Raises
        StateError unless they are rows of this model for these very tokens."""
        before, own = ids[: self.p0 * ID_BYTES], ids[self.p0 * ID_BYTES : self.p1 * ID_BYTES]
        if self.row_identity != row_identity:
            raise StateError("they are of another model or configuration")
        if self.adapters != adapters:
            raise StateError("they were computed under other adapters")
        if not own or len(before) != self.p0 * ID_BYTES or not self.ids.startswith(own):
            raise StateError("they are of other tokens")
        if segment_key(row_identity, adapters, before + self.ids) != self.chain:
            raise StateError("they stand behind other tokens")
        key = segment_key(row_identity, scope, before + self.ids)
        place = self.p0, self.p1, self.ids
        return SegmentHeader(row_identity, key, scope, *place, self.runs, self.head)


class RowsPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where rows [p0, p1) of a path are."""

    name: str
    p0: int
    p1: int
    is_public: bool
    """Whether they are sealed for all tenants."""
    n_parts: int
    """Of the object."""
    n_bytes: int = 0
    """Of all its parts, before they are sealed."""


class BasisPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a transform basis is, which some of the rows were coded with."""

    basis: str
    name: str
    is_public: bool


class CheckpointPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where the state after the first `position` tokens of a path is."""

    name: str
    position: int
    chain: bytes
    """BLAKE2b-256 of row identity, adapters and these tokens."""
    derived: bool
    """It was computed from approximate rows."""
    is_public: bool
    n_parts: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class PutRows:
    """Where the rows of a path are, from its first token on, the bases that some were coded with, and the state
    checkpoints on it."""

    rows: list[RowsPlace] = field(default_factory=list)
    transform_bases: list[BasisPlace] = field(default_factory=list)
    checkpoints: list[CheckpointPlace] = field(default_factory=list)

    @property
    def n_rows(self) -> int:
        """Tokens that have rows in the bucket."""
        return self.rows[-1].p1 if self.rows else 0

    @property
    def objects(self) -> list[str]:
        """The names of all objects."""
        names = [each.name for each in self.rows]
        names += [each.name for each in self.transform_bases]
        return names + [each.name for each in self.checkpoints]

    @property
    def n_tokens(self) -> int:
        """Tokens that need not be evaluated: that have rows, or that a state has seen."""
        return max([self.n_rows, *(each.position for each in self.checkpoints)])


class Record(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a record of a session and of a base have in common."""

    version: int
    row_identity: bytes
    """Of the rows."""
    adapters: str
    rows: list[RowsPlace]
    """Consecutive, from the first token on."""
    transform_bases: list[BasisPlace]


class SessionRecord(Record, frozen=True, array_like=True, kw_only=True):
    """A session: its `.tower` file, and where the rows of its current branch are."""

    tower: bytes
    turns: list[bytes] = []
    """The digest of each turn; none in records of the first version."""
    contains: list[str] = []
    """The texts, as in names of records, of other records of the session whose turns it has, too."""
    others: list[RowsPlace] = []
    """Rows of its other branches, which prompts find by their marks."""
    checkpoints: list[CheckpointPlace] = []
    """On its current branch, also those that earlier records put."""
    other_checkpoints: list[CheckpointPlace] = []
    """Of its other branches."""


class BaseRecord(Record, frozen=True, array_like=True, kw_only=True):
    """A precached prompt, as `towerd.store.sessions.turn.Base` has it."""

    name: str
    level: int
    tokenizer: bytes
    ids: bytes
    format: str | None
    reuse: str
    checkpoints: list[CheckpointPlace] = []


def put_of(record: SessionRecord | BaseRecord) -> PutRows:
    """Where the rows and checkpoints of a record are."""
    return PutRows(record.rows, record.transform_bases, record.checkpoints)


def encode(value: msgspec.Struct) -> bytes:
    """The bytes of a header or a record."""
    return msgspec.msgpack.encode(value)


def decode_record(data: bytes, kind: type[R]) -> R:
    """A record of this kind. Raises StateError."""
    try:
        found = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StateError(f"the record cannot be read: {error}") from error
    if found.version != VERSION:
        raise StateError(f"the record has version {found.version}; this towerd reads {VERSION}")
    return found


def _place(name: str, part: int) -> str:
    return f"objects/{name}/{part:04d}"


def has_object(hold: Hold, name: str) -> bool:
    """Whether an object is there, and may be named: its first part is written last, and deleted first. Raises
    BucketError."""
    return not hold.is_condemned(f"objects/{name}") and hold.has(_place(name, 0))


def count_parts(n_bytes: int) -> int:
    """The number of parts that an object has."""
    return max(1, -(-n_bytes // PART_BYTES))


def put_object(
    hold: Hold, keys: TenantKeys, name: str, lead: bytes, data: memoryview | None = None
) -> int:
    """Put the parts of an object that the bucket lacks, the first part last; returns the bytes that were sent.
    name: a free one; its bytes are `lead` and then `data`, which are copied a part at a time. Raises BucketError."""
    rest = memoryview(b"") if data is None else data
    n_parts, sent = count_parts(len(lead) + len(rest)), 0
    if hold.has(_place(name, 0)):
        return 0
    is_new = n_parts == 1 or not hold.has(_place(name, n_parts - 1))
    for part in reversed(range(n_parts)):
        place = _place(name, part)
        if not is_new and 0 < part and hold.has(place):
            continue
        start, end = part * PART_BYTES, (part + 1) * PART_BYTES
        behind = bytes(rest[max(0, start - len(lead)) : max(0, end - len(lead))])
        sealed = keys.seal(place, lead[start:end] + behind)
        if hold.put(place, sealed):
            sent += len(sealed)
    return sent


class PartsAhead:
    """The parts of objects, in order, each verified. While one is used, the next are fetched and opened on threads."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._threads = ThreadPoolExecutor(AHEAD_PARTS, "towerd-parts")
        self._ahead: deque[tuple[str, Future[bytes]]] = deque()
        self._next: deque[tuple[TenantKeys, str]] = deque()

    def expect(self, keys: TenantKeys, name: str, n_parts: int) -> None:
        """Fetch so many parts of an object, too, as soon as those before it leave room."""
        self._next.extend((keys, _place(name, part)) for part in range(n_parts))
        self._fill()

    def of(self, keys: TenantKeys, name: str) -> Iterator[bytes]:
        """Those of an object: the one that is expected next, or another. They end with the first that is not full.
        Raises BucketError, StateError."""
        part = 0
        while True:
            try:
                found = self._part(keys, _place(name, part))
            except ObjectMissing:
                if part == 0:
                    raise
                return  # the object ends where a part does
            yield found
            if len(found) < PART_BYTES:
                return
            part += 1

    def close(self) -> None:
        """Wait for nothing: what is fetched now is dropped when it comes."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _part(self, keys: TenantKeys, place: str) -> bytes:
        if any(place == each for each, _ in self._ahead):
            while self._ahead[0][0] != place:  # what was passed over is not needed
                self._ahead.popleft()
        if self._ahead and self._ahead[0][0] == place:
            _, coming = self._ahead.popleft()
            self._fill()
            return coming.result()
        return self._open(keys, place)

    def _fill(self) -> None:
        while self._next and len(self._ahead) < AHEAD_PARTS:
            keys, place = self._next.popleft()
            self._ahead.append((place, self._threads.submit(self._open, keys, place)))

    def _open(self, keys: TenantKeys, place: str) -> bytes:
        return keys.unseal(place, self._bucket.get(place, PART_BYTES + SEAL_BYTES))


@dataclass(frozen=True, slots=True)
class FoundRows:
    """The rows of an object, whose data are fetched while they are read."""

    header: RowsHeader
    data: Iterator[memoryview]


def name_and_lead(keys: TenantKeys, header: RowsHeader) -> tuple[str, bytes]:
    """The name of the object with these rows, and the bytes before its data. Raises StateError for a header
    that does not fit one part."""
    encoded = encode(header)
    if len(encoded) > PART_BYTES - _LENGTH.size:
        raise StateError("the header does not fit an object")
    return keys.name("rows", encoded), _LENGTH.pack(len(encoded)) + encoded


def read_rows(keys: TenantKeys, name: str, parts: Iterable[bytes]) -> FoundRows:
    """The rows of the object of this name. Raises StateError, also while the data are read; BucketError."""
    each = iter(parts)
    first = next(each)
    if len(first) < _LENGTH.size:
        raise StateError("the object is too short")
    end = _LENGTH.size + _LENGTH.unpack_from(first)[0]
    encoded = first[_LENGTH.size : end]
    if end > len(first) or keys.name("rows", encoded) != name.partition("-")[0]:
        raise StateError("the object's header is not that of its name")
    try:
        header = msgspec.msgpack.decode(encoded, type=RowsHeader)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StateError(f"the object's header cannot be read: {error}") from error
    if len(header.ids) != (header.p1 - header.p0) * ID_BYTES:
        raise StateError("the object's header contradicts itself")
    return FoundRows(header, _data(memoryview(first)[end:], each, header.n_bytes))


def _data(first: memoryview, others: Iterator[bytes], n_bytes: int) -> Iterator[memoryview]:
    at = len(first)
    yield first
    while at < n_bytes:
        part = next(others, b"")
        if not part:
            break
        at += len(part)
        yield memoryview(part)
    if at != n_bytes:
        raise StateError(f"the object has {at} bytes of rows, its header says {n_bytes}")
