"""Rows of segments: which there are, loading them, keeping them in memory, writing them."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from towerd.errors import DiskFull, RowsDamaged, StoreError
from towerd.slots.errors import StateError
from towerd.slots.rows import KVRows
from towerd.store import durable
from towerd.store.catalog import Catalog
from towerd.store.keys import segment_key
from towerd.store.node import ID_BYTES, Node
from towerd.store.segment_file import Claim, SegmentFile
from towerd.store.segment_writer import Draft, new_name, write_segment
from towerd.store.state import StoreState

Tier: TypeAlias = Literal["hot", "warm"]

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES})


@dataclass(frozen=True, slots=True)
class RowsPart:
    """Rows [p0, p1) of one node. It holds on to where they are, so a split or an eviction of
    the node after planning does no harm."""

    node: Node
    p0: int
    p1: int
    tier: Tier
    source: KVRows | SegmentFile


class RowStore:
    """The row side of a store; `state` and its lock are shared with the rest of it."""

    def __init__(self, state: StoreState, pool: Executor) -> None:
        self._state = state
        self._pool = pool
        self.writing: set[str] = set()
        """Names of files that are not in the catalog yet; gc must leave them alone."""

    def plan(self, nodes: Sequence[Node], start: int, stop: int) -> list[RowsPart]:
        """The rows of [start, stop) along a path, up to the first token without any."""
        parts: list[RowsPart] = []
        at = start
        for node in nodes:
            if node.p1 <= at or at >= stop:
                continue
            source = node.hot if node.hot is not None else node.file
            if source is None:
                break
            tier: Tier = "hot" if node.hot is not None else "warm"
            end = min(node.p1, stop)
            parts.append(RowsPart(node, at, end, tier, source))
            at = end
        return parts

    def load(self, part: RowsPart) -> KVRows:
        """The rows themselves, as views. Raises RowsDamaged (the file is in quarantine now) or
        StoreError (it cannot be opened for want of descriptors or memory)."""
        if isinstance(part.source, KVRows):
            return part.source.slice(part.p0, part.p1)
        file = part.source
        self._ensure_verified(file, part.node)
        try:
            return file.rows(self._state.fingerprint.layout, part.p0, part.p1)
        except (StateError, OSError) as error:
            raise self._damaged(file, error) from error

    def load_boundary(self, node: Node, position: int) -> memoryview:
        """The boundary state at `position`, a view. KeyError if there is none; else as `load`."""
        file = node.file
        if file is None or position not in node.boundaries:
            raise KeyError(position)
        self._ensure_verified(file, node)
        try:
            return file.boundary(position)
        except (StateError, OSError) as error:
            raise self._damaged(file, error) from error

    def attach_hot(self, nodes: Sequence[Node], rows: KVRows) -> list[Node]:
        """Give every node of the path that ends with `nodes` and lies within `rows` its slice,
        unless it is hot already; returns the nodes that became hot.

        Raises StateError for rows of another layout or with gaps."""
        state = self._state
        if rows.layout != state.fingerprint.layout or not rows.is_consecutive:
            raise StateError("these rows have another layout than the store's, or gaps")
        taken = []
        with state.lock:
            for node in _covered(nodes, rows.p0, rows.p1):
                if node.hot is None:
                    node.hot = rows.slice(node.p0, node.p1)
                    state.hot_bytes += node.hot.nbytes
                    taken.append(node)
        return taken

    def drop_hot(self, node: Node) -> int:
        """Let go of a node's rows in memory; returns their bytes."""
        with self._state.lock:
            n_bytes = 0 if node.hot is None else node.hot.nbytes
            node.hot = None
            self._state.hot_bytes -= n_bytes
        return n_bytes

    def write(self, nodes: Sequence[Node], boundaries: Mapping[int, bytes]) -> SegmentFile:
        """Write the hot rows of consecutive nodes of one path into one file, durably."""
        state = self._state
        with state.lock:
            if nodes and all(node.file is not None for node in nodes):
                assert nodes[-1].file is not None
                return nodes[-1].file
            draft = _draft(nodes, boundaries, state.digest)
        directory, name = state.directory, new_name()
        self.writing.add(name)
        try:
            with durable.store_errors("rows cannot be written"):
                n_bytes = write_segment(draft, name, directory.tmp, directory.segments, self._pool)
            try:
                return self._adopt(nodes, draft, name, n_bytes)
            except BaseException:
                directory.remove(name)
                raise
        finally:
            self.writing.discard(name)

    def drop_file(self, file: SegmentFile, *, set_aside: bool = False) -> int:
        """Forget a file: its nodes keep their tokens only. Deletes it, or moves it into
        quarantine; returns the bytes it had. Nothing happens if it is gone already."""
        state = self._state
        with state.lock:
            if file.dropped:
                return 0
            try:
                uncatalogue(state.catalog, file.id)
            except DiskFull:
                # deleting must work most of all now; a catalogued file that is missing is
                # forgotten at the next opening, so the order does not matter
                state.directory.remove(file.path.name)
                with suppress(DiskFull):
                    uncatalogue(state.catalog, file.id)
            state.forget_file(file)
        if set_aside:
            state.directory.set_aside(file.path.name)
        else:
            state.directory.remove(file.path.name)
        return file.nbytes

    def drop_missing(self) -> None:
        """Forget the files that someone deleted while no store was open."""
        names = self._state.directory.names()
        for file in list(self._state.files.values()):
            if file.path.name not in names:
                self.drop_file(file)

    def _ensure_verified(self, file: SegmentFile, node: Node) -> None:
        if file.dropped:
            raise RowsDamaged(f"the rows in {file.path.name} were dropped meanwhile")
        if file.verified:
            return
        state = self._state
        with state.lock:
            views = [(viewer.p0, viewer.ids) for viewer in file.nodes]
            prefix = node.prefix_bytes()
        try:
            file.verify(Claim(state.fingerprint, prefix, views), self._pool)
        except (StateError, OSError) as error:
            raise self._damaged(file, error) from error

    def _damaged(self, file: SegmentFile, error: Exception) -> StoreError:
        """Quarantine `file`; the error to raise."""
        if isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES:
            return StoreError(f"{file.path} cannot be opened: {error.strerror}")
        if file.dropped:
            return RowsDamaged(f"the rows in {file.path.name} were dropped meanwhile")
        try:
            self.drop_file(file, set_aside=True)
        except StoreError:
            with self._state.lock:  # the catalog cannot be written now; forget it here at least
                self._state.forget_file(file)
        return RowsDamaged(f"rows in {file.path.name} are damaged and set aside: {error}")

    def _adopt(self, nodes: Sequence[Node], draft: Draft, name: str, n_bytes: int) -> SegmentFile:
        """Enter a written file in the catalog for the nodes that lie in it by now."""
        state = self._state
        p0, p1 = draft.parts[0].p0, draft.parts[-1].p1
        with state.lock:
            targets = [node for node in _covered(nodes, p0, p1) if node.file is None]
            if not targets:
                raise StoreError("the segments were removed while their rows were written")
            positions = sorted(draft.boundaries)
            with state.catalog.transaction():
                id = state.catalog.run(
                    "INSERT INTO files(fingerprint, name, p0, n_rows, bytes, boundaries, created)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        state.fingerprint_pk, name, p0, p1 - p0, n_bytes,
                        np.array(positions, "<i4").tobytes(), state.clock(),
                    ),
                )  # fmt: skip
                state.catalog.run_many(
                    "UPDATE segments SET file = ?, file_row0 = ?, file_rows = ? WHERE id = ?",
                    [(id, node.p0 - p0, node.n, node.id) for node in targets],
                )
            path = state.directory.segments / name
            file = SegmentFile(id, path, p0, p1 - p0, n_bytes, tuple(positions), state.mappings)
            for node in targets:
                node.file, node.file_row0 = file, node.p0 - p0
            file.nodes = targets
            state.files[id] = file
            state.warm_bytes += n_bytes
        return file


def uncatalogue(catalog: Catalog, file_id: int) -> None:
    """Take a file out of the catalog; its segments keep their tokens."""
    with catalog.transaction():
        catalog.run(
            "UPDATE segments SET file = NULL, file_row0 = 0, file_rows = 0 WHERE file = ?",
            (file_id,),
        )
        catalog.run("DELETE FROM files WHERE id = ?", (file_id,))


def _covered(nodes: Sequence[Node], p0: int, p1: int) -> list[Node]:
    """The nodes now on the path of `nodes` that lie within [p0, p1), top first. A split since
    `nodes` was taken put new nodes above the old ones, so the path is walked from below."""
    alive = [node for node in nodes if not node.removed]
    if not alive:
        return []
    return [node for node in alive[-1].path() if node.p0 >= p0 and node.p1 <= p1]


def _draft(nodes: Sequence[Node], boundaries: Mapping[int, bytes], digest: bytes) -> Draft:
    """What to write for consecutive hot nodes of one scope. Raises StoreError."""
    if not nodes:
        raise StoreError("no segments to write")
    parts = []
    for above, node in zip([None, *nodes], nodes, strict=False):
        if node.removed or node.hot is None:
            raise StoreError(f"segment {node.id} has no rows in memory to write")
        if above is not None and (node.parent is not above or node.scope != above.scope):
            raise StoreError("only consecutive segments of one scope can share a file")
        parts.append(node.hot)
    first, last = nodes[0], nodes[-1]
    if any(not first.p0 < position <= last.p1 for position in boundaries):
        raise StoreError("a boundary state lies outside the segments")
    prefix = last.prefix_bytes()
    return Draft(
        digest, segment_key(digest, last.scope, prefix), last.scope,
        prefix[first.p0 * ID_BYTES :], parts, dict(boundaries),
    )  # fmt: skip
