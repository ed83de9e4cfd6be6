"""A short path whose rows are in one file, and its re-encoding."""

from __future__ import annotations

import numpy as np
from store_tools import write_all

from towerd.store import FormatRequest, Node, SegmentFile, Store

IDS = np.arange(100, 150, dtype=np.int32)


def one_leaf(store: Store, ends: tuple[int, ...] = (50,)) -> tuple[Node, SegmentFile]:
    """A path whose rows are in one file; its leaf."""
    leaf = store.insert(IDS, "local", ends)[-1]
    write_all(store, leaf)
    assert leaf.file is not None
    return leaf, leaf.file


def reencode(store: Store, file: SegmentFile, *requests: FormatRequest) -> SegmentFile:
    new = store.rows.reencode(file, requests)
    assert new is not None
    return new
