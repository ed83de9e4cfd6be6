"""What is about to leave the disk for want of space is put into the bucket before it does.

Nothing waits for that: rows that are not there in time are lost, as without a bucket.
"""

from __future__ import annotations

from collections.abc import Callable

from towerd.store import Node, SegmentFile, Store
from towerd.store.tree.scope import tenant_of
from towerd.tiers.shared.objects import PutRows
from towerd.tiers.shared.tier import SharedTier

_LOOKED_AT_MAX = 256
"""Nodes below a file that are looked at for a session."""


class Leaving:
    """The files that would be evicted first. Belongs to the thread that talks with the bucket."""

    def __init__(
        self,
        store: Store,
        shared: SharedTier,
        least_valuable: Callable[[int], list[SegmentFile]],
        is_worth: Callable[[int, int], bool],
        keep: Callable[[str, str, PutRows], object],
    ) -> None:
        """least_valuable: files of so many bytes in the order of eviction
        is_worth: whether rows of so many tokens and bytes are worth their upload
        keep: puts a record of a session, by id and scope, that names rows: others are garbage"""
        self._store, self._shared = store, shared
        self._least_valuable, self._is_worth = least_valuable, is_worth
        self._keep = keep
        self._passed: set[int] = set()
        """Ids of files that were tried, or are not worth it."""

    def put_next(self, bytes_max: int) -> bool:
        """Put the rows of the first file that leaves if no more than `bytes_max` may stay and that the bucket lacks;
        False if there is none. Raises BucketError or StoreError."""
        excess = self._store.state.warm_bytes - bytes_max
        found = self._least_valuable(excess) if excess > 0 and self._shared.can_resume else []
        self._passed &= {file.id for file in found}
        for file in found:
            if file.in_bucket or file.id in self._passed:
                continue
            self._passed.add(file.id)
            end, session = self._end(file)
            if end is not None:
                with self._store.locked():
                    ids = end.prefix_ids()
                with self._shared.held():
                    put = self._shared.put_path(ids, end.scope)
                    self._keep(session, tenant_of(end.scope), put)
                self._shared.counters.add(saved=int(file.in_bucket))
                return True
        return False

    def _end(self, file: SegmentFile) -> tuple[Node | None, str]:
        """The last node that views a file, and a session that continues from its rows; None if they are not worth
        putting: there is no such session, or to put them takes longer than to evaluate them."""
        with self._store.locked():
            nodes = [node for node in self._store.viewers(file) if not node.removed]
            end = max(nodes, key=lambda node: node.p1, default=None)
            session = None if end is None else self._session(end, file.p0)
        if end is None or session is None or not self._is_worth(end.p1 - file.p0, file.nbytes):
            return None, ""
        return end, session

    def _session(self, end: Node, p0: int) -> str | None:
        """A session that has tokens behind `p0` on a path through `end`. Pinned files, such as those of bases, are
        never evicted."""
        level, n_looked = [end], 0
        while level and n_looked < _LOOKED_AT_MAX:
            node = level.pop()
            found = self._store.session_beyond(node, p0, tenant_of(node.scope))
            if found is not None:
                return found[0]
            level += node.children
            n_looked += 1
        return None
