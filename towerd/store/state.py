"""What all parts of an open store share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from towerd.slots.fingerprint import Fingerprint
from towerd.store.catalog import Catalog
from towerd.store.directory import Directory
from towerd.store.listener import Listener
from towerd.store.node import Node
from towerd.store.segment_file import Mappings, SegmentFile
from towerd.store.trie import Trie


class Held(NamedTuple):
    """How a segment's rows are kept."""

    format: str | None
    """`native`, a stored format, or several joined by "+", first rows first; None: no rows."""
    nbytes: int
    """What they take; without rows, what native ones would."""


@dataclass(slots=True)
class StoreState:
    """Trie, catalog and files of one open store; `lock` guards everything below it and is
    never held during bulk file I/O."""

    directory: Directory
    catalog: Catalog
    fingerprint: Fingerprint
    digest: bytes
    fingerprint_pk: int
    clock: Callable[[], float]
    mappings: Mappings
    lock: threading.RLock
    trie: Trie
    files: dict[int, SegmentFile]
    hot_bytes: int = 0
    warm_bytes: int = 0
    """Files of this fingerprint on disk."""
    touched: set[Node] = field(default_factory=set)
    """Nodes whose last use is not in the catalog yet."""
    listener: Listener = field(default_factory=Listener)

    def touch(self, node: Node) -> None:
        """Note a use of `node` and of everything it stands on; reaches the disk in batches."""
        now = self.clock()
        for each in node.path():
            each.last_used = now
            each.hits += 1
            self.touched.add(each)

    def held(self, node: Node) -> Held:
        """How a node's rows are kept: in memory, else on disk, else not at all."""
        layout = self.fingerprint.layout
        if node.hot is not None:
            names = [part.layout.format_name for part in node.hot]
            return Held("+".join(dict.fromkeys(names)), node.hot.nbytes)
        if node.file is None:
            return Held(None, node.n * layout.token_bytes)
        first, end = node.file_row0, node.file_row0 + node.n
        runs = [run for run in node.file.runs if run.row0 < end and first < run.end]
        n_bytes = sum(
            (min(end, run.end) - max(first, run.row0)) * layout.stored_as(run.format).token_bytes
            for run in runs
        )
        return Held("+".join(dict.fromkeys(run.format for run in runs)), n_bytes)

    def forget_file(self, file: SegmentFile) -> None:
        """Take a file out of memory; rows that someone still views stay readable."""
        for node in file.nodes:
            node.file, node.file_row0 = None, 0
        file.nodes = []
        file.dropped = True
        self.mappings.forget(file)
        if self.files.pop(file.id, None) is not None:
            self.warm_bytes -= file.nbytes
            self.listener.left_warm(file)
