"""DivergenceFinder: finds the stored conversation that a prompt diverged from, once it was answered.

It looks among the towers that leave the prompt's path near the place where reuse ended, the last used
ones first. The prompt's own turn is among them by then, and does not diverge from it.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from towerd.engine.base import Reuse
from towerd.errors import TowerdError
from towerd.search.reading import TurnReader
from towerd.sessions.divergence import KNOWN_MIN, Divergence, diverge, n_known
from towerd.store import Node, Store
from towerd.store.tree.scope import is_public, public_of
from towerd.store.tree.tree import PrefixTree
from towerd.tokens import Ids, common_prefix, ids_bytes

log = logging.getLogger(__name__)

TOWERS_MAX = 8
_CHILDREN_MAX = 1000
NEAR_TOKENS = 64
"""A tower that leaves the path so shortly before the end of reuse may have more of the prompt than those
that leave it there: two times of day share digits with a third."""


def is_due(reuse: Reuse) -> bool:
    """Whether rows were moved, or so much was evaluated that a divergence may be the reason. What was
    thawed has another."""
    return not reuse.cold and (reuse.moved > 0 or reuse.prefill > KNOWN_MIN)


class DivergenceFinder:
    """Works on a thread of its own. Belongs to the event loop."""

    def __init__(self, store: Store, reader: TurnReader) -> None:
        self._store = store
        self._reader = reader
        self._thread = ThreadPoolExecutor(1, "towerd-why")

    async def find(
        self, ids: Ids, scope: str, reuse: Reuse, session: str | None = None
    ) -> Divergence | None:
        """Why not more of a prompt was found; None: nothing that was evaluated is known, or it is too
        late. session: the one that the request names."""
        n_reused = reuse.live + reuse.hot + reuse.warm - reuse.moved  # from the first token on
        try:
            work = self._thread.submit(self._find, ids, scope, n_reused, session)
        except RuntimeError:  # closed
            return None
        return await asyncio.wrap_future(work)

    async def close(self) -> None:
        """Drop what waits, and wait for what runs."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def _find(self, ids: Ids, scope: str, n_reused: int, session: str | None) -> Divergence | None:
        try:
            return self._best(ids, scope, n_reused, session)
        except Exception as error:
            unexpected = None if isinstance(error, TowerdError) else error
            log.warning(
                "why a prompt was not found whole is not known",
                exc_info=unexpected,
                extra={"error": str(error)},
            )
            return None

    def _best(self, ids: Ids, scope: str, n_reused: int, session: str | None) -> Divergence | None:
        most, best = 0, None
        for tower, owner, base in self._towers(ids, scope, n_reused):
            at = common_prefix(ids, tower)
            start = max(at, n_reused)
            n = 0 if at == min(len(ids), len(tower)) else n_known(ids, tower, start, at)
            if n < KNOWN_MIN:
                continue
            # That reuse ended here is explained by a tower which leaves the path here, and best by one
            # of the same session.
            is_end, is_own = at >= n_reused, owner == session
            worth = n * (1 + is_end) * (1 + is_own)
            if worth > most:
                most, best = worth, (tower, n, owner, base)
            if is_end and (is_own or session is None) and 2 * n > len(ids) - start:
                break
        if best is None:
            return None
        tower, n, owner, base = best
        return diverge(ids, tower, n, self._reader.own_vocabulary(), session=owner, base=base)

    def _towers(self, ids: Ids, scope: str, n_reused: int) -> Iterator[tuple[Ids, str, str]]:
        """(ids, session, base) of the towers to compare a prompt with. None of a conversation that was
        deleted: what it said may be in the tree until the next gc."""
        with self._store.locked():
            tree = self._store.state.tree
            ends = tower_ends(tree, ids_bytes(ids), scope, n_reused - NEAR_TOKENS)
        bases = {base.node: base.name for base in self._store.bases.listing()} if ends else {}
        for end in ends:
            with self._store.locked():
                tower = end.prefix_ids()
            owner = self._store.session_beyond(end, common_prefix(ids, tower), scope)
            if owner is not None:
                yield tower[: owner[1]], owner[0], ""
            elif end.id in bases:
                yield tower, "", bases[end.id]


def tower_ends(tree: PrefixTree, ids: bytes, scope: str, start: int) -> list[Node]:
    """The ends of towers of a scope, or public, that leave the path of `ids` behind `start` tokens, the
    last used ones first. Runs under the store's lock."""
    seen = {scope, public_of(scope)}
    match = tree.match(ids, scope)
    path = [tree.root, *match.nodes]
    on_path = {node.id for node in path}
    waiting: list[tuple[float, int, Node]] = []

    def wait_for(nodes: list[Node]) -> None:
        for node in heapq.nlargest(TOWERS_MAX, nodes, key=_recency):
            heapq.heappush(waiting, (-_recency(node), node.id, node))

    if path[-1].p1 > match.n:
        wait_for([path.pop()])
    for node in path:
        if node.p1 >= start:
            children = node.newest(_CHILDREN_MAX)
            wait_for([each for each in children if each.scope in seen and each.id not in on_path])
    found: list[Node] = []
    while waiting and len(found) < TOWERS_MAX:
        node = heapq.heappop(waiting)[2]
        below = [each for each in node.newest(_CHILDREN_MAX) if each.scope in seen]
        wait_for(below)
        if not below:
            found.append(node)
    return found


def _recency(node: Node) -> float:
    """When a node was used last. Of public ones that tells what other tenants do: they are taken first
    where others may be below them, else last."""
    if not is_public(node.scope):
        return node.last_used
    return float("inf") if node.children else 0.0
