"""Prefetch: rows of conversations that are expected back soon, from disk into RAM.

What comes is planned by `towerd.policy.prefetch`, among what the policy says it wants.
Conservative, as in PBKV (section 4.3): into free room only, within a bandwidth, and only while
the engine merely decodes or idles. Rows that were fetched so count as nobody's until a request uses
them: they are the first to leave, and no policy takes them for used.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

from towerd.errors import NotFound, StoreError
from towerd.policy.prefetch import Candidate, Room, budget, plan
from towerd.store import Node, Store
from towerd.tiers.ranking import Ranking

log = logging.getLogger(__name__)

WANTED_MAX = 16
"""Conversations looked at in one step."""
BUSY_WAIT_S = 1.0
IDLE_WAIT_S = 5.0
_BURST_S = 2.0
"""So many seconds' worth of bandwidth may be used at once after a pause."""


class Prefetcher:
    """Called by the tier thread; `covered`, `holds`, `split` and `forget` by whoever holds the
    store's lock, which guards what is held."""

    def __init__(
        self,
        store: Store,
        ranking: Ranking,
        promote: Callable[[Node], bool],
        *,
        bytes_per_s: int,
        clock: Callable[[], float],
    ) -> None:
        """promote: copies a node's rows into RAM, or does not; bytes_per_s: 0 fetches nothing"""
        self.n_fetched = self.n_used = 0
        self._store = store
        self._ranking = ranking
        self._promote = promote
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._is_quiet: Callable[[], bool] | None = None
        self._on_cold: Callable[[Node], None] | None = None
        self._allowance = 0.0
        self._last_s: float | None = None
        self._did_work = False
        self._held: OrderedDict[int, Node] = OrderedDict()
        """Rows fetched but not used yet, oldest first, and those being fetched."""

    def start(
        self, is_quiet: Callable[[], bool], on_cold: Callable[[Node], None] | None = None
    ) -> None:
        """Fetch from now on. is_quiet: whether the engine merely decodes or idles; on_cold: called
        with what is expected back and has no rows anywhere, to be thawed ahead"""
        self._on_cold = on_cold
        self._is_quiet = is_quiet

    def stop(self) -> None:
        """Stop fetching and make no more callbacks."""
        self._is_quiet = self._on_cold = None

    @property
    def is_on(self) -> bool:
        """Whether prefetch is active: the policy predicts reuse, and there is bandwidth."""
        return self._bytes_per_s > 0 and self._ranking.predicts_reuse

    def wait_s(self) -> float:
        """When to call `step` again."""
        if not self.is_on:
            return float("inf")
        return BUSY_WAIT_S if self._did_work else IDLE_WAIT_S

    def step(self, room: int) -> None:
        """Fetch what is wanted, up to `room` bytes and the bandwidth that has accrued."""
        self._accrue()
        self._did_work = False
        is_quiet = self._is_quiet
        if not self.is_on or is_quiet is None or not is_quiet():
            return
        nodes: dict[int, Node] = {}
        candidates = self._candidates(nodes)
        most = budget(Room(max(0, room), 0, 0, int(self._allowance), only_decodes=True))
        for key in plan(candidates, most):
            try:
                self._fetch(nodes[key])
            except StoreError as error:
                log.warning("rows could not be fetched ahead", extra={"error": str(error)})

    def covered(self, path: list[Node]) -> None:
        """A request uses `path`: what was fetched of it is the policy's now."""
        for node in path:
            self.n_used += self._held.pop(node.id, None) is not None

    def holds(self, node: Node) -> bool:
        """Whether a node's rows in RAM were fetched and not used yet."""
        return node.id in self._held

    def split(self, lower: Node, upper: Node) -> None:
        """`upper` is the beginning of what `lower` was."""
        if lower.id in self._held:
            self._held[upper.id] = upper

    def forget(self, node: Node) -> None:
        """Forget a removed node or its dropped rows."""
        self._held.pop(node.id, None)

    def give_back(self, bytes_needed: int) -> int:
        """Release rows that were fetched but not used, oldest first; returns the bytes freed."""
        freed = 0
        while freed < bytes_needed:
            with self._store.locked():
                if not self._held:
                    break
                freed += self._store.drop_hot(self._held.popitem(last=False)[1])
        return freed

    def _candidates(self, nodes: dict[int, Node]) -> list[Candidate]:
        """What is on disk only of the towers that the policy wants, each part worth the most of
        what goes through it. Enters them in `nodes`, and hands on what has no rows at all."""
        found: dict[int, Candidate] = {}
        for tip_id, value in self._ranking.wanted(WANTED_MAX):
            try:
                tip = self._store.node(tip_id)
            except NotFound:
                continue  # it is gone since the policy heard of it
            on_cold = self._on_cold
            if tip.hot is None and tip.file is None and on_cold is not None:
                on_cold(tip)
            with self._store.locked():
                for node in tip.path():
                    if node.hot is None and node.file is not None and node.id not in found:
                        parent = node.parent.id if node.parent is not None else None
                        nbytes = self._store.held(node).nbytes
                        found[node.id] = Candidate(node.id, nbytes, value, parent)
                        nodes[node.id] = node
        return list(found.values())

    def _fetch(self, node: Node) -> None:
        """Copy one node's rows into RAM; they are nobody's until a request uses them, which may
        be while they are copied."""
        with self._store.locked():
            if node.removed or node.hot is not None:
                return
            nbytes = self._store.held(node).nbytes
            self._held[node.id] = node
        try:
            self.n_fetched += self._promote(node)
        finally:
            with self._store.locked():
                for each in [each for each in self._held.values() if each.hot is None]:
                    del self._held[each.id]
        self._allowance -= nbytes
        self._did_work = True

    def _accrue(self) -> None:
        now = self._clock()
        if self._last_s is not None:
            most = _BURST_S * self._bytes_per_s
            earned = max(0.0, now - self._last_s) * self._bytes_per_s
            self._allowance = min(most, self._allowance + earned)
        self._last_s = now
