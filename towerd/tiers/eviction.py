"""Evicting rows from RAM, and segment files, when a tier holds more than its budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from towerd.store import Node, SegmentFile, Store
from towerd.store.rows.collect import drop_foreign
from towerd.tiers.ranking import Ranking
from towerd.tiers.writer import TierCounters, find_node

log = logging.getLogger(__name__)

_USED_MIN = 0.75
"""Share of a buffer. When less of it is used, the used rows are copied out."""
_LAST_SHARE = 0.125
"""Of the files on disk this share, worth least, is looked at for what the shared tier has, too."""
_SHARING_MAX = 8
"""Maximum number of segments copied. If more share a buffer, most of it is in use."""


class Evictor:
    """Evicts what the policy ranks lowest. Belongs to the thread of the tiers."""

    def __init__(
        self, store: Store, ranking: Ranking, counters: TierCounters, unwritten: Collection[int]
    ) -> None:
        """unwritten: ids of the nodes whose rows in RAM must be written first"""
        self._store = store
        self._ranking = ranking
        self._counters = counters
        self._unwritten = unwritten
        self._has_complained = False
        """Whether the log says that pinned segments do not fit."""

    def evict_hot(self, bytes_max: int, pinned_bytes_max: int) -> None:
        """Drop rows in RAM until they fit. Rows whose file was evicted for space may go, too; only
        unwritten rows must wait. Those of pinned segments leave only if they do not fit into
        `pinned_bytes_max`, or `bytes_max` if that is more."""
        self._evict_hot(lambda: self._store.state.hot_bytes - bytes_max, self._can_drop_hot)
        bytes_max = max(bytes_max, pinned_bytes_max)
        if self._store.state.hot_bytes <= bytes_max:
            return
        too_much = self._pinned_bytes() - bytes_max
        if too_much > 0 and not self._has_complained:
            log.warning(
                "the rows of precached and pinned prompts do not fit into RAM: unpin some, or set "
                "--hot-bytes to what they take; until then those worth least are read from disk",
                extra={"pinned_bytes": too_much + bytes_max, "pinned_bytes_max": bytes_max},
            )
        self._has_complained = too_much > 0
        if too_much > 0:
            self._evict_hot(lambda: self._pinned_bytes() - bytes_max, self._is_written)

    def evict_waiting(self, bytes_max: int, write: Callable[[int], None]) -> None:
        """Where a budget limits writing: what RAM has no room for is written, what is worth least
        first, or given up where `write` may not write it."""

        def is_unpinned(node_id: int) -> bool:
            node = self._store.state.tree.nodes.get(node_id)
            return node is not None and not node.pinned

        self._evict_hot(lambda: self._store.state.hot_bytes - bytes_max, is_unpinned, write)

    def drop_unwritten(self) -> None:
        """Drop what is left of rows in RAM, also what no disk takes: their tokens can be evaluated again."""
        self._evict_hot(lambda: self._store.state.hot_bytes, lambda node_id: True)

    def evict_warm(self, bytes_max: int) -> None:
        """Delete files until they fit, into what the disk leaves for them, too: those of other row identities first;
        of the files that are worth least, those that the shared tier has, too. Pinned ones leave for the disk
        alone, last."""
        disk = self._store.disk
        if disk.is_short():
            self._store.state.directory.empty_quarantine()
        disk.trim_checkpoints()
        disk_bytes_max = disk.rows_bytes_max(bytes_max)
        self._evict_unpinned(disk_bytes_max)
        if (
            disk.bytes_max
            and (excess := rows_bytes(self._store) - disk.rows_bytes_max(disk.bytes_max)) > 0
        ):
            self._evict_warm(excess, lambda file: True)

    def _evict_unpinned(self, bytes_max: int) -> None:
        excess = rows_bytes(self._store) - bytes_max
        if excess <= 0:
            return
        excess -= drop_foreign(self._store.state, excess)
        if excess > 0 and any(file.in_bucket for file in list(self._store.state.files.values())):
            last = self.least_valuable(excess + int(_LAST_SHARE * bytes_max))
            if elsewhere := {file for file in last if file.in_bucket}:
                excess -= self._evict_warm(excess, elsewhere.__contains__)
        if excess > 0:
            self._evict_warm(excess, self._can_drop)

    def _evict_warm(self, excess: int, may_drop: Callable[[SegmentFile], bool]) -> int:
        """Returns the bytes of what was deleted."""
        freed = 0
        for file in self._ranking.warm_victims(excess, may_drop):
            if self._store.rows.drop_file(file, may=may_drop):  # it may be pinned by now
                self._counters.warm_evicted += 1
                freed += file.nbytes
        return freed

    def least_valuable(self, nbytes: int) -> list[SegmentFile]:
        """The files that `evict_warm` would delete first, `nbytes` of them."""
        return self._ranking.warm_victims(nbytes, self._can_drop, leave=False)

    def _evict_hot(
        self,
        excess: Callable[[], int],
        may_drop: Callable[[int], bool],
        before: Callable[[int], None] = lambda node_id: None,
    ) -> None:
        while (n_bytes := excess()) > 0:
            victims = self._ranking.hot_victims(n_bytes, may_drop)
            for node_id in victims:
                before(node_id)
            if not sum([self.drop_hot(node_id, may_drop) for node_id in victims]):
                break

    def drop_hot(self, node_id: int, may_drop: Callable[[int], bool] | None = None) -> int:
        """Release a victim's rows in RAM; returns their bytes. may_drop: asked again, under the
        lock; by default it spares pinned segments."""
        may_drop = may_drop or self._can_drop_hot
        with self._store.locked():
            node = find_node(self._store, node_id)
            if node is None or not may_drop(node_id):
                return 0  # removed, or got new rows, since it was chosen
            left = None if node.hot is None else node.hot.buffers()
            freed = self._store.rows.drop_hot(node)
            wasteful = [] if left is None else sharing_buffers(node, left)
        for each in wasteful:
            self._store.rows.unshare(each)
        self._counters.hot_evicted += freed > 0
        return freed

    def _is_written(self, node_id: int) -> bool:
        return node_id not in self._unwritten

    def _can_drop_hot(self, node_id: int) -> bool:
        node = self._store.state.tree.nodes.get(node_id)  # without the lock, see hot_victims
        return self._is_written(node_id) and not (node is not None and node.pinned)

    def _pinned_bytes(self) -> int:
        nodes = self._store.nodes()
        return sum(node.hot.nbytes for node in nodes if node.pinned and node.hot is not None)

    def _can_drop(self, file: SegmentFile) -> bool:
        return not any(node.pinned for node in self._store.viewers(file))


def rows_bytes(store: Store) -> int:
    """Bytes of all segment files, those of other row identities included."""
    return store.state.warm_bytes + store.state.foreign_bytes


def sharing_buffers(node: Node, buffers: Mapping[int, int]) -> list[Node]:
    """Segments above `node` whose rows are views of buffers that its own rows were views of, if
    they are few and use little of that memory. Rows of one path are exported together, and both
    parts of a split segment stay in one buffer. Call it while the store is locked."""
    found: list[Node] = []
    n_used, above = 0, node.parent
    while above is not None and above.hot is not None and above.hot.buffers().keys() & buffers:
        if len(found) == _SHARING_MAX:
            return []
        found.append(above)
        n_used += above.hot.nbytes
        above = above.parent
    return found if n_used < _USED_MIN * sum(buffers.values()) else []
