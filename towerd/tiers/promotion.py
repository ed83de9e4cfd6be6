"""Promotion: rows read from disk are copied into RAM, safe from page cache pressure."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from towerd.store import Node, RowsPart, Store
from towerd.tiers.counters import TierCounters
from towerd.tokens import has_derived


class Promoter:
    """`step` and `copy_up` are for the tier thread; `used`, `waits`, `split` and `forget` for
    whoever holds the store's lock; the rest may be called by any thread."""

    def __init__(
        self, store: Store, counters: TierCounters, nbytes_max: Callable[[], int], delay_s: float
    ) -> None:
        """nbytes_max: what a segment may take at most. delay_s: rows are copied when the request
        that read them is recorded, or after this long."""
        self._store = store
        self._counters = counters
        self._nbytes_max = nbytes_max
        self._delay_s = delay_s
        self._due: list[tuple[float, int, Sequence[Node]]] = []
        """A heap by time.monotonic()."""
        self._number = count()
        self._waiting: set[int] = set()
        self._lock = threading.Lock()

    def read(self, nodes: Sequence[Node]) -> None:
        """The rows of these were read from disk."""
        with self._lock:
            self._waiting.update(node.id for node in nodes)
        self._schedule(nodes, self._delay_s)

    def used(self, path: Iterable[Node]) -> bool:
        """A request that used `path` was recorded; whether any of it is to be copied now."""
        due = [node for node in path if node.id in self._waiting]
        if due:
            self._schedule(due, 0.0)
        return bool(due)

    def waits(self, node: Node) -> bool:
        """Whether a node's rows are to be copied."""
        return node.id in self._waiting

    def split(self, lower: Node, upper: Node) -> None:
        """`upper` is the beginning of what `lower` was."""
        with self._lock:
            if lower.id in self._waiting:
                self._waiting.add(upper.id)

    def forget(self, node: Node) -> None:
        """A node is gone."""
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
        """Copy the rows that a node has on disk only; whether that was done."""
        with self._store.locked():
            n_bytes = self._store.held(node).nbytes
            if node.hot is not None or node.file is None or n_bytes > self._nbytes_max():
                return False
            part = RowsPart(node, node.p0, node.p1, "warm", node.file)
        derived = has_derived(part.provenance)
        taken = self._store.attach_hot([node], self._store.load_rows(part).copy(), derived=derived)
        self._counters.promoted += len(taken)
        return bool(taken)

    def _schedule(self, nodes: Sequence[Node], after_s: float) -> None:
        with self._lock:
            heapq.heappush(self._due, (time.monotonic() + after_s, next(self._number), nodes))

    def _next(self) -> list[Node]:
        """What is due first, with what splits cut off the beginnings of its nodes since."""
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
