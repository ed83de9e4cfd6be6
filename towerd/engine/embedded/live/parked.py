"""Parked towers: partial sequences that left the context, kept in RAM.

The store has every token of such a chat but no rows that were computed over a partial live set, so
its live rows are kept here unchanged. If they are dropped, or the daemon ends, the chat's tokens
are evaluated again under its budget. Called by the inference thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from towerd.drift import DecodedRun
from towerd.engine.embedded.context.sequences import Buffer
from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.engine.live_index import LiveIndex
from towerd.tokens import Ids, Provenances


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """One chat: its tokens int32[n], their provenance uint8[n], its live set with the offloaded
    rows, and the live rows as a sequence blob."""

    scope: str
    session: str | None
    ids: Ids
    provenance: Provenances
    live_set: BoundedSet
    blob: Buffer
    n_min: int = 0
    """The fewest of its tokens that it may be cut to."""
    n_reserved: int = 0
    """See `LiveSeq.n_reserved`."""
    decoded: tuple[DecodedRun, ...] = ()
    """See `LiveSeq.decoded`."""

    rank: ClassVar = (0,)
    """See `Holder.rank`: below every live sequence."""

    @property
    def n(self) -> int:
        return len(self.ids)

    def n_visible(self, scope: str) -> int:
        """See `Holder.n_visible`."""
        return self.n if self.scope == scope else 0

    @property
    def nbytes(self) -> int:
        return self.blob.nbytes + self.ids.nbytes + self.provenance.nbytes + self.live_set.nbytes


class ParkedTowers:
    """The most recently used chats, within `bytes_max`."""

    def __init__(self, bytes_max: int, index: LiveIndex[Any]) -> None:
        """index: where they register"""
        self.bytes_max = bytes_max
        self._index = index
        self.nbytes = 0
        self._by_age: list[Parked] = []
        """The most recently used is last."""

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, parked: Parked) -> None:
        """Add a chat, and drop the least recently used ones; one that is too big is not kept."""
        if parked.nbytes > self.bytes_max:
            return
        self._by_age.append(parked)
        self._index.add(parked)
        self.nbytes += parked.nbytes
        while self.nbytes > self.bytes_max:
            self.drop_one()

    def drop_one(self) -> bool:
        """Drop the least recently used chat; False if there is none."""
        if not self._by_age:
            return False
        self.take(self._by_age[0])
        return True

    def halve(self) -> None:
        """Drop the least recently used chats, until the others take half of the bytes, or none."""
        most = self.nbytes // 2
        while self.nbytes > most and self.drop_one():
            pass

    def clear(self) -> None:
        """Drop all chats."""
        for parked in list(self._by_age):
            self.take(parked)

    def take(self, parked: Parked) -> None:
        """Remove a chat, which is about to become live or has no room."""
        self._by_age.remove(parked)
        self._index.remove(parked)
        self.nbytes -= parked.nbytes

    def __iter__(self) -> Iterator[Parked]:
        return iter(self._by_age)
