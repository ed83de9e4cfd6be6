"""Writing rows from RAM to segment files."""

from __future__ import annotations

from dataclasses import dataclass

from towerd.errors import NotFound, SegmentsGone
from towerd.store import Node, Store
from towerd.store.rows.rows import lacks
from towerd.tokens import Provenance


@dataclass(slots=True)
class TierCounters:
    """Segments and bytes since the start."""

    written: int = 0
    promoted: int = 0
    hot_evicted: int = 0
    warm_evicted: int = 0
    damaged: int = 0
    write_errors: int = 0
    bytes_written: int = 0

    def stats(self) -> dict[str, int]:
        """The counters by their names in /metrics, except `damaged`, which has other contributors."""
        return {
            "segments_written": self.written,
            "segments_promoted": self.promoted,
            "hot_evictions": self.hot_evicted,
            "warm_evictions": self.warm_evicted,
            "write_errors": self.write_errors,
            "bytes_written": self.bytes_written,
        }


class RowsWriter:
    """Writes the rows that are only in RAM. `unwritten` may be read by any thread; all else
    belongs to the thread of the tiers."""

    def __init__(self, store: Store, counters: TierCounters, sufficient: Provenance) -> None:
        """sufficient: a file with worse rows than that is replaced when better ones are in RAM"""
        self._store = store
        self._counters = counters
        self._sufficient = sufficient
        self.unwritten: set[int] = set()
        """Ids of the nodes whose rows in RAM must be written."""

    def is_unwritten(self, node: Node) -> bool:
        """Whether the node has rows in RAM that its file lacks."""
        hot = node.worst_hot
        return hot is not None and lacks(node.worst_file, hot, self._sufficient)

    def write_path(self, leaf: Node) -> None:
        """Write every run of hot, unwritten nodes on the path to `leaf`, one file per run. Moved
        rows get files of their own, which are deleted once better rows have replaced them. Raises
        StoreError."""
        runs: list[list[Node]] = []
        with self._store.locked():
            for node in leaf.path():
                if not self.is_unwritten(node):
                    continue
                last = runs[-1][-1] if runs else None
                if last is not None and last is node.parent and _is_moved(last) == _is_moved(node):
                    runs[-1].append(node)
                else:
                    runs.append([node])
        for run in runs:
            self._write(run)

    def write_remaining(self) -> None:
        """Write what is unwritten, wherever it is. Raises StoreError."""
        for node_id in list(self.unwritten):
            node = find_node(self._store, node_id)
            if node is None or not self.is_unwritten(node):
                self.unwritten.discard(node_id)
            else:
                self.write_path(node)

    def _write(self, nodes: list[Node]) -> None:
        try:
            file = self._store.rows.write(nodes, sufficient=self._sufficient)
        except SegmentsGone:
            return
        self._counters.written += len(nodes)
        self._counters.bytes_written += file.nbytes


def _is_moved(node: Node) -> bool:
    return node.origin == Provenance.AFTER_MOVED


def find_node(store: Store, node_id: int) -> Node | None:
    """The node with this id; None if it was removed."""
    try:
        return store.node(node_id)
    except NotFound:
        return None
