"""Thinned sequences that left the context, in RAM.

The store has every token of such a chat but no rows that were computed under a thinned cache, so
what is live of it is kept here as it is. If it goes, or the daemon ends, the chat's tokens are
evaluated again under its budget. Called by the inference thread only.
"""

from __future__ import annotations

from dataclasses import dataclass

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.longchat.live_set import BoundedSet
from towerd.engine.embedded.model.context import Buffer
from towerd.tokens import Ids, Provenances, common_prefix


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """One chat: its tokens int32[n], what each token's rows are, the account of what is live (and
    of what may come back) and its rows as a sequence blob."""

    scope: str
    session: str | None
    ids: Ids
    provenance: Provenances
    retained: BoundedSet
    blob: Buffer

    @property
    def n(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return self.blob.nbytes + self.ids.nbytes + self.provenance.nbytes + self.retained.nbytes


class ParkedTowers:
    """The last used ones, within `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.nbytes = 0
        self._by_age: list[Parked] = []
        """The last used last."""

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, parked: Parked) -> None:
        """Keep it, in place of the ones used longest ago; not if it is too big by itself."""
        self._by_age.append(parked)
        self.nbytes += parked.nbytes
        while self.nbytes > self.bytes_max:
            self.nbytes -= self._by_age.pop(0).nbytes

    def best(self, ids: Ids, scope: str, budget: LiveBudget) -> tuple[Parked | None, int]:
        """The one of this budget that shares the longest prefix with `ids` and has the tokens just
        before its end, and its length; of equal ones the last used."""
        best: Parked | None = None
        best_n = 0
        for each in self._by_age:
            if each.scope != scope or each.retained.budget != budget:
                continue
            n = common_prefix(each.ids, ids)
            if n and n >= best_n and each.retained.can_go_on_from(n):
                best, best_n = each, n
        return best, best_n

    def clear(self) -> None:
        """Keep none."""
        self._by_age.clear()
        self.nbytes = 0

    def take(self, parked: Parked) -> None:
        """It is about to become live."""
        self._by_age.remove(parked)
        self.nbytes -= parked.nbytes

    def entries(self) -> list[tuple[Ids, str, BoundedSet]]:
        """Tokens, scope and account of each."""
        return [(each.ids, each.scope, each.retained) for each in self._by_age]
