"""Prefetch: copies rows of conversations that are expected back soon from disk into RAM.

`towerd.policy.prefetch` plans what to fetch, among what the policy wants. Prefetch is conservative,
as in PBKV (section 4.3): it uses free memory only, stays within a bandwidth, and runs only while
the engine merely decodes or idles. Until a request uses them, prefetched rows are unknown to the
policies and are the first to be evicted.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

from towerd.errors import StoreError
from towerd.policy.prefetch import Candidate, plan
from towerd.store import Node, Store
from towerd.tiers.ranking import Ranking
from towerd.tiers.writer import find_node

log = logging.getLogger(__name__)

WANTED_MAX = 16
"""Conversations examined in one step."""
BUSY_WAIT_S = 1.0
IDLE_WAIT_S = 5.0
_BURST_S = 2.0
"""The bandwidth accrued over this many seconds may be used at once after a pause."""


class Prefetcher:
    """Fetches what the policy wants. Methods are for the tier thread, except `covered`, `holds`,
    `split` and `forget`, which must be called under the store's lock: it guards what is held."""

    def __init__(
        self,
        store: Store,
        ranking: Ranking,
        promote: Callable[[Node], bool],
        *,
        bytes_per_s: int,
        clock: Callable[[], float],
    ) -> None:
        """promote: copies a node's rows into RAM and returns whether it did. bytes_per_s: the
        bandwidth; 0: no prefetch."""
        self.n_fetched = self.n_used = 0
        self._store = store
        self._ranking = ranking
        self._promote = promote
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._is_quiet: Callable[[], bool] | None = None
        self._on_cold: Callable[[int], None] | None = None
        self._allowance = 0.0
        self._last_s: float | None = None
        self._did_work = False
        self._held: OrderedDict[int, Node] = OrderedDict()
        """Rows fetched but not used yet, oldest first, and those being fetched."""

    def start(
        self, is_quiet: Callable[[], bool], on_cold: Callable[[int], None] | None = None
    ) -> None:
        """Start fetching. is_quiet: whether the engine merely decodes or idles. on_cold: receives
        the ids of nodes that are expected back and have no rows anywhere, or are gone since their
        session was frozen, to thaw them ahead."""
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
        """Seconds until `step` should be called again."""
        if not self.is_on:
            return float("inf")
        return BUSY_WAIT_S if self._did_work else IDLE_WAIT_S

    def step(self, room: int) -> None:
        """Fetch what the policy wants, up to `room` bytes and the accrued bandwidth."""
        self._accrue()
        self._did_work = False
        is_quiet = self._is_quiet
        if not self.is_on or is_quiet is None or not is_quiet():
            return
        nodes: dict[int, Node] = {}
        candidates = self._candidates(nodes)
        for key in plan(candidates, min(room, int(self._allowance))):
            try:
                self._fetch(nodes[key])
            except StoreError as error:
                log.warning("rows could not be fetched ahead", extra={"error": str(error)})

    def covered(self, path: list[Node]) -> None:
        """Note that a request uses `path`: its prefetched rows now belong to the policy."""
        for node in path:
            self.n_used += self._held.pop(node.id, None) is not None

    def holds(self, node: Node) -> bool:
        """Whether a node's rows in RAM were prefetched and are still unused."""
        return node.id in self._held

    def split(self, lower: Node, upper: Node) -> None:
        """`upper` is the beginning of what `lower` was."""
        if lower.id in self._held:
            self._held[upper.id] = upper

    def forget(self, node: Node) -> None:
        """Forget a removed node or its dropped rows."""
        self._held.pop(node.id, None)

    def give_back(self, bytes_needed: int) -> int:
        """Release rows that were fetched but not used, oldest first; returns the bytes freed. Those
        of pinned segments stay."""
        freed = 0
        with self._store.locked():
            for node in [node for node in self._held.values() if not node.pinned]:
                if freed >= bytes_needed:
                    break
                freed += self._store.rows.drop_hot(node)
                self._held.pop(node.id, None)
        return freed

    def _candidates(self, nodes: dict[int, Node]) -> list[Candidate]:
        """The nodes that are only on disk, of the towers that the policy wants. Each has the
        highest value among the towers through it. Enters them in `nodes`, and passes ends without
        any rows to `on_cold`."""
        found: dict[int, Candidate] = {}
        for end_id, value in self._ranking.wanted(WANTED_MAX):
            end = find_node(self._store, end_id)
            on_cold = self._on_cold
            if on_cold is not None and (end is None or not end.has_rows):
                on_cold(end_id)
            if end is None:
                continue
            with self._store.locked():
                for node in end.path():
                    if node.hot is None and node.file is not None and node.id not in found:
                        parent = node.parent.id if node.parent is not None else None
                        nbytes = self._store.ram_bytes(node)
                        found[node.id] = Candidate(node.id, nbytes, value, parent)
                        nodes[node.id] = node
        return list(found.values())

    def _fetch(self, node: Node) -> None:
        """Copy one node's rows into RAM. They are held here until a request uses them, possibly
        while they are being copied."""
        with self._store.locked():
            if node.removed or node.hot is not None:
                return
            nbytes = self._store.ram_bytes(node)
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
