"""The state shared by all parts of an open store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from towerd.errors import StoreError
from towerd.slots.fingerprint import Fingerprint
from towerd.store.catalog.catalog import Catalog, EnteredIdentity, Lock
from towerd.store.files.directory import Directory
from towerd.store.segments.format_run import FormatRun
from towerd.store.segments.segment_file import SegmentFile, quantized_bytes
from towerd.store.state.growth import Growth
from towerd.store.tree.listener import Listener
from towerd.store.tree.node import Node
from towerd.store.tree.tree import PrefixTree


class Held(NamedTuple):
    """How a segment's rows are kept."""

    format: str | None
    """`native`, a stored format, or several joined by "+", first rows first; None: no rows."""
    nbytes: int
    """Bytes of the rows; without rows, the bytes that native ones would take."""


@dataclass(slots=True)
class StoreState:
    """The prefix tree, catalog and files of one open store; `lock` guards everything below it and is
    never held during bulk file I/O."""

    directory: Directory
    catalog: Catalog
    fingerprint: Fingerprint
    digest: bytes
    """The fingerprint's."""
    identity: EnteredIdentity
    clock: Callable[[], float]
    lock: Lock
    tree: PrefixTree
    files: dict[int, SegmentFile]
    hot_bytes: int = 0
    warm_bytes: int = 0
    """Files of this fingerprint on disk."""
    foreign_bytes: int = 0
    """Files of other fingerprints on disk."""
    touched: set[Node] = field(default_factory=set)
    """Nodes whose last use is not in the catalog yet."""
    listener: Listener = field(default_factory=Listener)
    is_open: bool = True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of an open store. Raises StoreError if it is closed."""
        with self.lock:
            self.check_open()
            yield

    def check_open(self) -> None:
        """Raises StoreError if the store is closed."""
        if not self.is_open:
            raise StoreError("the store is closed")

    def touch(self, node: Node) -> None:
        """Record a use of `node` and its ancestors; written to disk in batches."""
        now = self.clock()
        for each in node.path():
            each.last_used = now
            each.hits += 1
            self.touched.add(each)

    def flush(self) -> None:
        """Write the recorded uses to the catalog."""
        touched = [node for node in self.touched if not node.removed]
        if touched:
            with self.catalog.transaction():
                self.catalog.run_many(
                    "UPDATE segments SET last_used = max(last_used, ?), hits = max(hits, ?)"
                    " WHERE id = ?",
                    [(node.last_used, node.hits, node.id) for node in touched],
                )
        self.touched.clear()

    @contextmanager
    def growing(self) -> Iterator[Growth]:
        """A transaction that may grow the tree; splits are reported once it is durable."""
        with self.catalog.transaction() as undo:
            known = self.identity
            growth = Growth(
                self.catalog,
                self.tree,
                known.tokenizer,
                known.tokenizer_digest,
                self.clock(),
                undo,
            )
            yield growth
        for lower, upper in growth.splits:
            self.listener.split(lower, upper)

    def insert(self, ids: bytes, scope: str, ends: Sequence[int]) -> list[Node]:
        """Make a path for `ids` with a node end at each of `ends`, as `Store.insert` does; runs under
        the lock."""
        with self.growing() as growth:
            path = growth.grow(ids, scope, ends)
        self.touch(path[-1])
        return path

    def held(self, node: Node) -> Held:
        """The format of a node's rows: in memory, else on disk, else none."""
        layout = self.fingerprint.layout
        if node.hot is not None:
            names = [part.layout.format_name for part in node.hot]
            return Held("+".join(dict.fromkeys(names)), node.hot.nbytes)
        if node.file is None:
            return Held(None, node.n * layout.token_bytes)
        names = [run.format for run in self._runs(node)]
        return Held("+".join(dict.fromkeys(names)), self.file_bytes(node))

    def file_bytes(self, node: Node) -> int:
        """Bytes of a node's rows on disk; 0 if there are none."""
        first, end, layout = node.file_row0, node.file_row0 + node.n, self.fingerprint.layout
        return sum(
            (min(end, run.end) - max(first, run.row0)) * layout.stored_as(run.format).token_bytes
            for run in self._runs(node)
        )

    def _runs(self, node: Node) -> list[FormatRun]:
        """The runs of the node's file that hold its rows."""
        first, end = node.file_row0, node.file_row0 + node.n
        runs = () if node.file is None else node.file.runs
        return [run for run in runs if run.row0 < end and first < run.end]

    def stats(self) -> dict[str, Any]:
        """Counts and sizes of the store's content."""
        disk = self.catalog.rows("SELECT coalesce(sum(bytes), 0) FROM files")[0][0]
        return {
            "segments": len(self.tree),
            "tokens": sum(node.n for node in self.tree.nodes.values()),
            "files": len(self.files),
            "sessions": self._count("sessions"),
            "bases": self._count("bases"),
            "paths_held": len(self.tree.held),
            "hot_bytes": self.hot_bytes,
            "warm_bytes": self.warm_bytes,
            "warm_quantized_bytes": quantized_bytes(self.files.values(), self.fingerprint.layout),
            "disk_bytes": int(disk),
            "catalog_bytes": self.catalog.bytes_on_disk(),
            "journal_bytes": self.catalog.journal_bytes(),
        }

    def _count(self, table: str) -> int:
        sql = f"SELECT count(*) FROM {table} WHERE tokenizer = ?"
        return int(self.catalog.rows(sql, (self.identity.tokenizer,))[0][0])

    def forget_file(self, file: SegmentFile) -> None:
        """Remove a file from memory; rows that are still viewed stay readable."""
        nodes = tuple(self.tree.viewers(file))
        for node in nodes:
            self.tree.unview(node)
        file.dropped = True
        if self.files.pop(file.id, None) is not None:
            self.warm_bytes -= file.nbytes
            self.listener.left_warm(file, nodes)
