"""What all parts of an open store share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from towerd.slots.fingerprint import Fingerprint
from towerd.store.catalog import Catalog
from towerd.store.directory import Directory
from towerd.store.node import Node
from towerd.store.segment_file import Mappings, SegmentFile
from towerd.store.trie import Trie


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

    def touch(self, node: Node) -> None:
        """Note a use of `node` and of everything it stands on; reaches the disk in batches."""
        now = self.clock()
        for each in node.path():
            each.last_used = now
            each.hits += 1
            self.touched.add(each)

    def forget_file(self, file: SegmentFile) -> None:
        """Take a file out of memory; rows that someone still views stay readable."""
        for node in file.nodes:
            node.file, node.file_row0 = None, 0
        file.nodes = []
        file.dropped = True
        self.mappings.forget(file)
        if self.files.pop(file.id, None) is not None:
            self.warm_bytes -= file.nbytes
