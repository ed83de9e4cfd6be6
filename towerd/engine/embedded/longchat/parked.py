"""Parked towers: partial sequences that left the context, kept in RAM.

The store has every token of such a chat but no rows that were computed over a partial live set, so
its live rows are kept here unchanged. If they are dropped, or the daemon ends, the chat's tokens
are evaluated again under its budget. Called by the inference thread only.
"""

from __future__ import annotations

from dataclasses import dataclass

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.longchat.live_set import BoundedSet
from towerd.engine.embedded.model.context import Buffer
from towerd.tokens import Ids, Provenances, common_prefix


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
        best: Parked | None = None
        best_n = 0
        for each in self._by_age:
            if each.scope != scope or each.live_set.budget != budget:
                continue
            n = common_prefix(each.ids, ids)
            if n and n >= best_n and each.live_set.can_continue_from(n):
                best, best_n = each, n
        return best, best_n

    def clear(self) -> None:
        """Drop all chats."""
        self._by_age.clear()
        self.nbytes = 0

    def take(self, parked: Parked) -> None:
        """Remove a chat that is about to become live."""
        self._by_age.remove(parked)
        self.nbytes -= parked.nbytes

    def entries(self) -> list[tuple[Ids, str, BoundedSet]]:
        """Tokens, scope and live set of each chat."""
        return [(each.ids, each.scope, each.live_set) for each in self._by_age]
