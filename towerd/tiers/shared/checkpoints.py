"""State checkpoints in the bucket, beside the rows of their path: put and fetched like these.

The bytes of one are a u32 with the length of a header, the header (msgpack), and the state. The header says of
which tokens it is, and has a digest of the state; a keyed hash of it is the object's name.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from towerd.slots.errors import StateError
from towerd.store import Store
from towerd.store.rows.checkpoints import StateCheckpoint
from towerd.store.segments.segment_header import segment_key
from towerd.store.sessions.deletions import DeletionWatch
from towerd.store.tree.scope import adapters_of, is_public
from towerd.tiers.checkpoint_tier import CheckpointTier
from towerd.tiers.shared.objects import CheckpointPlace, count_parts, encode
from towerd.tiers.shared.sealing import TenantKeys
from towerd.tokens import Ids, ids_bytes

LAST = 2
"""So many of a path travel, from its end: a client that words a reply anew resumes before it."""
_LENGTH = struct.Struct("<I")


class _StateHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a checkpoint is of."""

    row_identity: bytes
    adapters: str
    chain: bytes
    """BLAKE2b-256 of row identity, adapters and the tokens that the state has seen."""
    position: int
    derived: bool
    """It was computed from approximate rows."""
    digest: bytes
    """BLAKE2b-256 of the state."""


class SharedCheckpoints:
    """The checkpoints of a store whose model needs them to resume. Thread-safe."""

    def __init__(self, store: Store, tier: CheckpointTier, *, has_rows: bool) -> None:
        """has_rows: the model has rows, too, and resumes only where it has both"""
        self._store, self._tier, self._has_rows = store, tier, has_rows

    def on_path(self, ids: Ids, scope: str) -> list[StateCheckpoint]:
        """Those of `ids`, ascending, that this daemon resumes from."""
        with self._store.locked():
            match = self._store.match(ids, scope)
            there = (self._tier.table.at(node) for node in match.nodes if node.p1 <= match.n)
            return [
                each
                for each in there
                if each is not None and not (self._tier.exact and each.derived)
            ]

    def to_put(self, ids: Ids, scope: str) -> list[StateCheckpoint]:
        """The last ones of a path, and those at the ends of pinned prompts."""
        found = self.on_path(ids, scope)
        return [each for each in found if each in found[-LAST:] or each.node.pinned]

    def n_resumable(self, ids: Ids, scope: str, n_rows: int) -> int:
        """The position of the last one that has all rows before it. n_rows: tokens with rows here"""
        found = (each.position for each in self.on_path(ids, scope))
        return max((n for n in found if n <= n_rows or not self._has_rows), default=0)

    def of(self, places: Iterable[CheckpointPlace], ids: Ids, scope: str) -> list[CheckpointPlace]:
        """Those in the bucket that are of what `ids` begin with, and may be used here."""
        return [
            each
            for each in places
            if each.position <= len(ids) and not (self._tier.exact and each.derived)
            if each.chain == self._chain(ids, each.position, scope)
        ]

    def usable(
        self, places: Iterable[CheckpointPlace], ids: Ids, scope: str
    ) -> CheckpointPlace | None:
        """The last one of these."""
        found = self.of(places, ids, scope)
        return max(found, key=lambda place: place.position, default=None)

    def object_of(
        self, found: StateCheckpoint, keys: TenantKeys
    ) -> tuple[CheckpointPlace, bytes, memoryview]:
        """Where a checkpoint goes, its bytes before the state, and the state. Raises StoreError."""
        with self._store.locked():
            ids, scope = found.node.prefix_ids(), found.node.scope
        data = self._tier.table.load(found)
        header = _StateHeader(
            self._store.state.digest,
            adapters_of(scope),
            self._chain(ids, found.position, scope),
            found.position,
            found.derived,
            hashlib.blake2b(data.data, digest_size=32).digest(),
        )
        encoded = encode(header)
        lead, n_bytes = _LENGTH.pack(len(encoded)) + encoded, len(data)
        place = CheckpointPlace(
            keys.name("checkpoint", encoded),
            found.position,
            header.chain,
            found.derived,
            is_public(scope),
            count_parts(len(lead) + n_bytes),
            len(lead) + n_bytes,
        )
        return place, lead, data.data

    def take(
        self,
        place: CheckpointPlace,
        keys: TenantKeys,
        parts: Iterator[bytes],
        ids: Ids,
        scope: str,
        since: DeletionWatch | None,
    ) -> int:
        """Enter the checkpoint of an object for a path that begins with its tokens, to resume from when this returns;
        its bytes. Raises StateError (not
        what it should be), BucketError, SessionDeleted or StoreError."""
        data = bytearray()
        for part in parts:
            data += part
            if len(data) > place.n_bytes:
                raise StateError("the checkpoint is longer than its record says")
        end = _LENGTH.size + (_LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0)
        encoded, state = bytes(data[_LENGTH.size : end]), memoryview(data)[end:]
        if keys.name("checkpoint", encoded) != place.name.partition("-")[0]:
            raise StateError("the checkpoint's header is not that of its name")
        try:
            header = msgspec.msgpack.decode(encoded, type=_StateHeader)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise StateError(f"the checkpoint's header cannot be read: {error}") from error
        of = header.row_identity, header.adapters, header.chain, header.position, header.derived
        chain = self._chain(ids, place.position, scope)
        own = self._store.state.digest, adapters_of(scope), chain, place.position, place.derived
        if of != own:
            raise StateError("the checkpoint is of other tokens or of another model")
        if hashlib.blake2b(state, digest_size=32).digest() != header.digest:
            raise StateError("the checkpoint's state is damaged")
        with self._store.locked():
            self._store.check_not_deleted(ids, scope, since)
            ids = ids[: place.position]
            owner = self._store.insert(ids, scope, [place.position], since)[-1].scope
        if is_public(owner) and not place.is_public:
            raise StateError("it is a tenant's own, and its tokens are everybody's here")
        states = {place.position: (np.frombuffer(state, np.uint8), place.derived)}
        self._tier.keep(ids, scope, states)
        return len(data)

    def _chain(self, ids: Ids, position: int, scope: str) -> bytes:
        return segment_key(self._store.state.digest, adapters_of(scope), ids_bytes(ids[:position]))
