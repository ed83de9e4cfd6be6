"""Parked towers: partial sequences that left the context, kept in RAM.

The store has every token of such a chat but no rows that were computed over a partial live set, so
its live rows are kept here unchanged. If they are dropped, or the daemon ends, the chat's tokens
are evaluated again under its budget. Called by the inference thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.context.context import Buffer
from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.engine.longest_prefix import longest_prefix
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

    @property
    def n(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return self.blob.nbytes + self.ids.nbytes + self.provenance.nbytes + self.live_set.nbytes


class ParkedTowers:
    """The most recently used chats, within `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
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
        self.nbytes += parked.nbytes
        while self.nbytes > self.bytes_max:
            self.nbytes -= self._by_age.pop(0).nbytes

    def best(self, ids: Ids, scope: str, budget: LiveBudget) -> tuple[Parked | None, int]:
        """The chat of this budget that shares the longest prefix with `ids` and can continue from
        it, and the prefix's length; among equals the most recently used."""

        def n_shared(each: Parked) -> int:
            return each.n if each.scope == scope and each.live_set.budget == budget else 0

        def n_usable(each: Parked, n: int) -> int:
            return n if each.live_set.can_continue_from(n) else 0

        return longest_prefix(reversed(self._by_age), ids, n_shared, n_usable)

    def clear(self) -> None:
        """Drop all chats."""
        self._by_age.clear()
        self.nbytes = 0

    def take(self, parked: Parked) -> None:
        """Remove a chat that is about to become live."""
        self._by_age.remove(parked)
        self.nbytes -= parked.nbytes

    def __iter__(self) -> Iterator[Parked]:
        return iter(self._by_age)
