"""Alike: the base that a session's tokens are most like, as what its blob follows.

Bases are the only candidates: they stay in the tree whatever their sessions do. Likeness is the number of short
runs of tokens in common, wherever they stand. Where a base is no more, blobs that follow it without being its
continuations are coded again, after the tokens that are their own; until then its segment stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.store.rows.collect import BASE_TOKENS_MIN
from towerd.store.sessions.bases import BaseTable
from towerd.store.sessions.frozen import FrozenSession, WarmSession
from towerd.store.sessions.history import visible_bases
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node
from towerd.tokens import Ids, common_prefix, ids_array

RUN_TOKENS = 8
SHARE_MIN = 0.05
"""Share of a session's runs that a base must have: with fewer, a tenth of the blob cannot be saved."""
CANDIDATES_MAX = 256
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_STRAYS = (
    "SELECT s.id, s.scope FROM cold AS c JOIN sessions AS s ON s.pk = c.session"
    " JOIN segments AS g ON g.id = c.base WHERE s.tokenizer = ? AND c.n_base < g.p1"
    " AND NOT EXISTS (SELECT 1 FROM bases WHERE node = c.base)"
)


@dataclass(frozen=True, slots=True)
class Context:
    """What a blob follows: the tokens up to the end of `node`, of which its history begins with the first `n`."""

    node: Node | None
    n: int
    ids: Ids


@dataclass(slots=True)
class AlikeBases:
    """Finds contexts for the blobs of an open store. Thread-safe."""

    state: StoreState
    bases: BaseTable
    n_coded: int = 0
    bytes_saved: int = 0
    """Of the blobs that follow such a base, since the store was opened."""

    def context(self, warm: WarmSession, stream: Ids) -> Context | None:
        """The base that a session which is to be coded is most like, unless that is where it begins; None if
        it is like none."""
        own = stream[warm.n_base :]
        names = visible_bases(self.bases, warm.taken.info.scope)[-CANDIDATES_MAX:]
        found = [each for each in map(self._prefix, {base.node for base in names}) if each]
        best = nearest(own, [ids[warm.n_base :] for _, ids in found])
        if best is None:
            return None
        node, ids = found[best]
        n = common_prefix(ids, stream)
        return Context(node, n, ids) if n < min(len(ids), len(stream)) else None

    def _prefix(self, id: int) -> tuple[Node, Ids] | None:
        with self.state.locked():
            node = self.state.tree.nodes.get(id)
            return None if node is None else (node, node.prefix_ids())

    def context_of(self, frozen: FrozenSession) -> Context:
        """What a frozen session's blob should follow: what it does, or only its own tokens if that was a base
        that is no more."""
        with self.state.locked():
            rows = self.state.catalog.rows(
                "SELECT base, EXISTS (SELECT 1 FROM bases WHERE node = base) FROM cold"
                " WHERE session = ?",
                (frozen.session.pk,),
            )
            id, is_base = rows[0] if rows else (None, False)
            node = self.state.tree.nodes.get(id or 0)
            if node is None or is_base or frozen.n_base == node.p1:
                return Context(node, frozen.n_base, frozen.base)
            own = [each for each in node.path() if BASE_TOKENS_MIN <= each.p1 <= frozen.n_base]
            if not own:
                return Context(None, 0, ids_array(b""))
            return Context(own[-1], own[-1].p1, own[-1].prefix_ids())

    def strays(self) -> list[tuple[str, str]]:
        """(id, scope) of sessions whose blobs follow what was a base and is no more."""
        with self.state.locked():
            return self.state.catalog.rows(_STRAYS, (self.state.identity.tokenizer,))

    def note(self, bytes_saved: int) -> None:
        """A blob was written that follows such a base."""
        with self.state.locked():
            self.n_coded += 1
            self.bytes_saved += bytes_saved

    def stats(self) -> dict[str, int]:
        """Counters."""
        return {"alike_coded": self.n_coded, "alike_bytes_saved": self.bytes_saved}


def runs_of(ids: Ids) -> npt.NDArray[np.uint64]:
    """A hash of each RUN_TOKENS consecutive tokens: ascending, without duplicates."""
    n = len(ids) - RUN_TOKENS + 1
    if n <= 0:
        return np.zeros(0, np.uint64)
    wide, found = ids.astype(np.uint64), np.zeros(n, np.uint64)
    for i in range(RUN_TOKENS):
        found = (found ^ wide[i : i + n]) * _FACTOR  # wraps
    return np.unique(found)


def nearest(own: Ids, candidates: Iterable[Ids]) -> int | None:
    """Which of `candidates` has most runs of `own`; None if none has enough."""
    runs = runs_of(own)
    shared = [len(np.intersect1d(runs, runs_of(each), assume_unique=True)) for each in candidates]
    best = max(range(len(shared)), key=shared.__getitem__, default=None)
    return None if best is None or shared[best] <= SHARE_MIN * len(runs) else best
