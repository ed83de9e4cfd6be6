"""Promotion: copies rows that were read from disk into RAM, out of reach of page cache pressure."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from towerd.store import Node, RowsPart, Store
from towerd.tiers.writer import TierCounters
from towerd.tokens import Provenance, origin_of


class Promoter:
    """Copies rows from disk into RAM after their use. `step` and `copy_up` are for the tier thread;
    `used`, `waits`, `split` and `forget` must be called under the store's lock; any thread may call
    the rest."""

    def __init__(
        self, store: Store, counters: TierCounters, nbytes_max: Callable[[], int], delay_s: float
    ) -> None:
        """nbytes_max: maximum size of a segment to copy, in bytes. delay_s: rows are copied when
        the request that read them is recorded, or after this long."""
        self._store = store
        self._counters = counters
        self._nbytes_max = nbytes_max
        self._delay_s = delay_s
        self._due: list[tuple[float, int, Sequence[Node]]] = []
        """A heap ordered by time.monotonic()."""
        self._number = count()
        self._waiting: set[int] = set()
        self._lock = threading.Lock()

    def read(self, nodes: Sequence[Node]) -> None:
        """Note that the rows of `nodes` were read from disk."""
        with self._lock:
            self._waiting.update(node.id for node in nodes)
        self._schedule(nodes, self._delay_s)

    def used(self, path: Iterable[Node]) -> bool:
        """Note that a request which used `path` was recorded. Returns whether any of it must be
        copied now."""
        due = [node for node in path if node.id in self._waiting]
        if due:
            self._schedule(due, 0.0)
        return bool(due)

    def waits(self, node: Node) -> bool:
        """Whether a node's rows are waiting to be copied."""
        return node.id in self._waiting

    def split(self, lower: Node, upper: Node) -> None:
        """`upper` is the beginning of what `lower` was."""
        with self._lock:
            if lower.id in self._waiting:
                self._waiting.add(upper.id)

    def forget(self, node: Node) -> None:
        """Forget a removed node."""
        with self._lock:
            self._waiting.discard(node.id)

    def wait_s(self) -> float:
        """Seconds until `step` has something to do."""
        with self._lock:
            return max(0.0, self._due[0][0] - time.monotonic()) if self._due else float("inf")

    def step(self) -> None:
        """Copy what is due. Raises RowsDamaged or StoreError."""
        while self.wait_s() == 0.0:
            nodes = self._next()
            try:
                for node in nodes:
                    self.copy_up(node)
            finally:
                with self._lock:
                    self._waiting.difference_update(node.id for node in nodes)

    def copy_up(self, node: Node) -> bool:
        """Copy the rows of a node that has them only on disk; returns whether it did."""
        with self._store.locked():
            n_bytes = self._store.ram_bytes(node)
            if node.hot is not None or node.file is None or n_bytes > self._nbytes_max():
                return False
            file = node.file
            part = RowsPart(node, node.p0, node.p1, "warm", file)
        origin = origin_of(part.provenance)
        if file.is_decoded(part.p0, part.p1):  # they are native and yet approximate
            origin = max(origin, Provenance.APPROXIMATE)
        taken = self._store.rows.attach_hot(
            [node], self._store.rows.load(part).copy(), origin=origin
        )
        self._counters.promoted += len(taken)
        return bool(taken)

    def _schedule(self, nodes: Sequence[Node], after_s: float) -> None:
        with self._lock:
            heapq.heappush(self._due, (time.monotonic() + after_s, next(self._number), nodes))

    def _next(self) -> list[Node]:
        """The nodes due first, with the upper parts that splits have cut off them since."""
        with self._lock:
            nodes = heapq.heappop(self._due)[2]
        found: dict[int, Node] = {}
        with self._store.locked():
            for node in nodes:
                at: Node | None = node
                while at is not None and at.id in self._waiting and at.id not in found:
                    found[at.id] = at
                    at = at.parent
        return list(found.values())
