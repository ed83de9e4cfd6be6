"""Levels by use: how many conversations begin with a segment tells how deep it lies.

What most conversations begin with lies at level 0, what some share at level 1. What one conversation
alone has is deepest. Nothing is mirrored: sessions are counted along the paths of the tree.
"""

from __future__ import annotations

from collections.abc import Mapping

from towerd.store import Store

SHARED_BY = (4, 2)
"""How many conversations have to begin with a segment of level 0, and of level 1."""


def shared_levels(store: Store) -> Mapping[int, int]:
    """Node id -> its level, of every node that several conversations share. O(nodes on the paths of
    all sessions)."""
    return {
        node: next(level for level, fewest in enumerate(SHARED_BY) if n >= fewest)
        for node, n in store.count_sessions().items()
        if n >= min(SHARED_BY)
    }
