"""Writing rows from RAM to segment files."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from towerd.errors import NotFound, SegmentsGone, StoreError
from towerd.store import FormatRequest, Node, Store
from towerd.store.rows.recoding import CodingInterrupted
from towerd.store.rows.rows import lacks
from towerd.store.segments.coded_format import is_coded
from towerd.tokens import Provenance

log = logging.getLogger(__name__)

LONE_WAITS = 4
"""How many times as long the rows of a chat wait that was never continued."""
LOOK_S = 1.0
"""Time between two looks at rows that wait."""
RETRY_S = 30.0
"""Time until rows that could not be written are looked at again."""


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


class FormatsAtOnce(Protocol):
    """The formats that rows in memory are written in where that is to be done once."""

    pause: Callable[[], object]
    """Called before each piece of transform coding; raises CodingInterrupted if something else needs the
    cores."""

    def requests_for(self, nodes: Sequence[Node]) -> Sequence[FormatRequest]:
        """Those that take hardly any time to encode."""
        ...

    def coded_requests_for(self, nodes: Sequence[Node]) -> Sequence[FormatRequest]:
        """The transform codings that are preferred to them; none: none are."""
        ...


class RowsWriter:
    """Writes the rows that are only in RAM. `unwritten` may be read by any thread; all else
    belongs to the thread of the tiers."""

    def __init__(
        self,
        store: Store,
        counters: TierCounters,
        sufficient: Provenance,
        wait_s: float,
        clock: Callable[[], float],
        formats: FormatsAtOnce,
    ) -> None:
        """sufficient: a file with worse rows than that is replaced when better ones are in RAM
        wait_s: where a budget limits writing, rows wait until they were unused for so long
        formats: those that they are then written in"""
        self._store = store
        self._counters = counters
        self._sufficient = sufficient
        self._wait_s, self._clock, self._formats = wait_s, clock, formats
        self._due = 0.0
        """time.monotonic() at which rows that wait are looked at."""
        self.unwritten: set[int] = set()
        """Ids of the nodes whose rows in RAM must be written."""

    def is_unwritten(self, node: Node) -> bool:
        """Whether the node has rows in RAM that its file lacks."""
        hot = node.worst_hot
        return hot is not None and lacks(node.worst_file, hot, self._sufficient)

    def write_path(self, leaf: Node, *, may_wait: bool = False) -> None:
        """Write every run of hot, unwritten nodes on the path to `leaf`, one file per run. Moved
        rows get files of their own, which are deleted once better rows have replaced them. may_wait: not
        before they are transform-coded, if they are to be. Raises StoreError; CodingInterrupted if it
        may wait."""
        runs: list[list[Node]] = []
        with self._store.locked():
            for node in leaf.path():
                if not self.is_unwritten(node):
                    continue
                last = runs[-1][-1] if runs else None
                if last is not None and last is node.parent and _may_share_file(last, node):
                    runs[-1].append(node)
                else:
                    runs.append([node])
        for run in runs:
            self._write(run, may_wait)

    def write_remaining(self) -> None:
        """Write what is unwritten, wherever it is. Raises StoreError."""
        for node in self._unwritten_nodes():
            self.write_path(node)

    def _unwritten_nodes(self) -> list[Node]:
        """The deepest first, since what is unwritten of a path goes into one file."""
        found = []
        for node_id in list(self.unwritten):
            node = find_node(self._store, node_id)
            if node is None or not self.is_unwritten(node):
                self.unwritten.discard(node_id)
            else:
                found.append(node)
        return sorted(found, key=lambda node: -node.p1)

    @property
    def is_limited(self) -> bool:
        """Whether there is a budget for writing."""
        return self._store.writes.budget > 0

    def write_due(self) -> None:
        """Where writing is limited: write the rows that were unused for long enough; those that were
        never asked for again wait longer. Raises StoreError."""
        if not self.is_limited or time.monotonic() < self._due:
            return
        now, next_s = self._clock(), LOOK_S
        try:
            for node in self._unwritten_nodes():
                wait_s = self._wait_s * (1 if node.hits > 1 else LONE_WAITS)
                if abs(now - node.last_used) >= wait_s:  # also after a clock was set back
                    self.write_path(node, may_wait=True)
        except CodingInterrupted:
            pass  # what is encoded by now is used at the next look
        except StoreError:
            next_s = RETRY_S
            raise
        finally:
            self._due = time.monotonic() + next_s

    def due_s(self) -> float:
        """Seconds until `write_due` may have something to do."""
        if not self.is_limited or not self.unwritten:
            return math.inf
        return max(0.0, self._due - time.monotonic())

    def write_leaving(self, node_id: int) -> None:
        """Write the rows of a segment that are to leave RAM, with those above it, if the budget has
        room. Raises StoreError."""
        node = find_node(self._store, node_id)
        if node is not None and self.is_unwritten(node):
            self.write_path(node)

    def _write(self, nodes: list[Node], may_wait: bool) -> None:
        if not self.is_limited:
            self._write_in((), nodes)
            return
        try:
            if coded := self._formats.coded_requests_for(nodes):
                self._write_in(coded, nodes)
                return
        except CodingInterrupted:
            if may_wait:
                raise
        except ValueError as error:  # e.g. pictures' rows, which have no one position each
            log.info("rows are not transform-coded", extra={"error": str(error)})
        try:
            self._write_in(self._formats.requests_for(nodes), nodes)
        except ValueError as error:  # e.g. infinities, which no block code can hold
            log.warning("rows stay as computed", extra={"error": str(error)})
            self._write_in((), nodes)

    def _write_in(self, requests: Sequence[FormatRequest], nodes: list[Node]) -> None:
        """Write rows in these formats, if the budget has room; where the disk has none, they may leave RAM unwritten.
        Raises as `RowStore.write`, but for SegmentsGone; CodingInterrupted."""
        n_bytes = self._size(nodes, requests)
        if self.is_limited and not self._store.writes.allows("rows", n_bytes):
            return
        if not self._store.disk.make_room(n_bytes):
            self.unwritten.difference_update(node.id for node in nodes)
            return
        with suppress(SegmentsGone):
            file = self._store.rows.write(
                nodes, sufficient=self._sufficient, requests=requests, pause=self._formats.pause
            )
            self._counters.written += len(nodes)
            self._counters.bytes_written += file.nbytes

    def _size(self, nodes: Sequence[Node], requests: Sequence[FormatRequest]) -> int:
        """About the bytes of a file with these rows."""
        layout = self._store.state.row_identity.layout
        n_bytes = 0
        for node in nodes:
            if node.hot is None:
                continue
            n_bytes += node.hot.nbytes
            token_bytes = node.hot.nbytes // len(node.hot)
            for each in requests:
                if is_coded(each.format) or node.hot.is_native:
                    saved = max(0, token_bytes - each.token_bytes(layout))
                    n_bytes -= max(0, min(each.p1, node.p1) - max(each.p0, node.p0)) * saved
        return n_bytes


def _may_share_file(above: Node, node: Node) -> bool:
    moved = Provenance.AFTER_MOVED
    return above.scope == node.scope and (above.origin == moved) == (node.origin == moved)


def find_node(store: Store, node_id: int) -> Node | None:
    """The node with this id; None if it was removed."""
    try:
        return store.node(node_id)
    except NotFound:
        return None


def worst_stored(node: Node) -> Provenance | None:
    """The worst provenance of a segment's rows in memory or on disk, whichever are better; None if it
    has none."""
    found = [worst for worst in (node.worst_hot, node.worst_file) if worst is not None]
    return min(found, default=None)
