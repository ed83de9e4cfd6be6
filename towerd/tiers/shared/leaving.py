"""What is about to leave the disk for want of space is put into the bucket before it does.

Nothing waits for that: rows that are not there in time are lost, as without a bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from towerd.errors import NotFound
from towerd.store import Node, SegmentFile, Store
from towerd.store.tree.scope import tenant_of
from towerd.tiers.shared.bucket import BucketError
from towerd.tiers.shared.marks import MARK_TOKENS
from towerd.tiers.shared.objects import PutRows
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids

PASSED_S = 600.0
"""A file that was tried, or was not worth it, is passed over for so long."""
_LOOKED_AT_MAX = 256
"""Nodes below a file that are looked at for a session."""
_TOGETHER_MAX = 64
"""Files that are looked at for more of the same session."""


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A file, with the tokens up to its end and a session that continues from its rows."""

    file: SegmentFile
    ids: Ids
    scope: str
    session: str
    tenant: str

    @property
    def n_tokens(self) -> int:
        return len(self.ids) - self.file.p0

    def is_beside(self, other: _Leaving) -> bool:
        """Whether both are of one session."""
        return (self.session, self.tenant) == (other.session, other.tenant)


class Leaving:
    """The files that would be evicted first. Belongs to the thread that talks with the bucket."""

    def __init__(
        self,
        store: Store,
        shared: SharedTier,
        least_valuable: Callable[[int], list[SegmentFile]],
        is_worth: Callable[[int, int], bool],
        keep: Callable[[str, str, PutRows], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """least_valuable: files of so many bytes in the order of eviction
        is_worth: whether rows of so many tokens and bytes are worth their upload
        keep: puts a record of a session, by id and scope, that names rows: others are garbage
        clock: seconds since some moment"""
        self._store, self._shared = store, shared
        self._least_valuable, self._is_worth = least_valuable, is_worth
        self._keep, self._clock = keep, clock
        self._passed: dict[int, float] = {}
        """Ids of files that are passed over, and until when."""

    def put_next(self, bytes_max: int) -> bool:
        """Put the rows of the first file that leaves if no more than `bytes_max` may stay and that the bucket lacks,
        and with it others of its session that leave; False if there is none. Raises BucketError or StoreError."""
        excess = self._store.state.warm_bytes - bytes_max
        found = self._least_valuable(excess) if excess > 0 and self._shared.can_resume else []
        now, ids = self._clock(), {file.id for file in found}
        self._passed = {id: end for id, end in self._passed.items() if id in ids and now < end}
        waiting = [each for each in found if not each.in_bucket and each.id not in self._passed]
        for k, file in enumerate(waiting):
            first = self._leaving(file)
            if first is None or not self._is_worthwhile(first):
                self._passed[file.id] = now + PASSED_S
                continue
            others = map(self._leaving, waiting[k + 1 : k + _TOGETHER_MAX])
            alike = [each for each in others if each is not None and each.is_beside(first)]
            self._put([first, *filter(self._is_worthwhile, alike)])
            return True
        return False

    def _is_worthwhile(self, leaving: _Leaving) -> bool:
        return self._is_worth(leaving.n_tokens, leaving.file.nbytes)

    def _put(self, together: Sequence[_Leaving]) -> None:
        """Put files of one session, and one record that names them."""
        for each in together:
            self._passed[each.file.id] = self._clock() + PASSED_S
        done: list[tuple[_Leaving, PutRows, bool]] = []
        try:
            with self._shared.held():
                for each in sorted(together, key=lambda each: each.file.p0):
                    n_before = self._shared.counters.put
                    put = self._shared.put_path(each.ids, each.scope)
                    done.append((each, put, self._shared.counters.put > n_before))
                self._keep(
                    together[0].session, together[0].tenant, _all([put for _, put, _ in done])
                )
        except BucketError:  # it may be back soon
            for each in together:
                self._passed.pop(each.file.id, None)
            raise
        for each, put, is_new in done:
            self._shared.kept(each.ids, each.scope, put)
            self._shared.counters.add(saved=int(is_new and each.file.in_bucket))

    def _leaving(self, file: SegmentFile) -> _Leaving | None:
        """None if no session continues from its rows that a prompt would find."""
        with self._store.locked():
            nodes = [node for node in self._store.viewers(file) if not node.removed]
            end = max(nodes, key=lambda node: node.p1, default=None)
            session = None if end is None else self._session(end, file.p0)
            if end is None or session is None:
                return None
            return _Leaving(file, end.prefix_ids(), end.scope, *session)

    def _session(self, end: Node, p0: int) -> tuple[str, str] | None:
        """A session that has tokens behind `p0` on a path through `end`, and its tenant's scope, unless it is shorter
        than what prompts are looked up by. Pinned files, such as those of bases, are never evicted."""
        level, n_looked = [end], 0
        while level and n_looked < _LOOKED_AT_MAX:
            node = level.pop()
            tenant = tenant_of(node.scope)
            found = self._store.session_beyond(node, p0, tenant)
            if found is not None and self._n_tokens(found[0], tenant) >= MARK_TOKENS:
                return found[0], tenant
            level += node.children
            n_looked += 1
        return None

    def _n_tokens(self, session: str, tenant: str) -> int:
        """Of its current branch."""
        try:
            return self._store.session(session, tenant).n_tokens
        except NotFound:
            return 0


def _all(puts: Sequence[PutRows]) -> PutRows:
    """What any of them names, each once."""
    rows = dict.fromkeys(place for put in puts for place in put.rows)
    bases = {place.basis: place for put in puts for place in put.transform_bases}
    states = dict.fromkeys(place for put in puts for place in put.checkpoints)
    return PutRows(list(rows), list(bases.values()), list(states))
