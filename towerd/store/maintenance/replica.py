"""Replica: the part of the catalog that a process has in memory, kept equal to what others write.

Several processes may have models of one store open, each with a prefix tree of its tokenizer. They
take turns: whoever takes the store's lock is first told which rows the others changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from towerd.store.catalog.catalog import DELETED, Changed
from towerd.store.rows.collect import detach
from towerd.store.sessions.bases import BaseTable
from towerd.store.sessions.cold import ColdTable
from towerd.store.sessions.deletions import Deletion, Deletions
from towerd.store.state.state import StoreState, count_pins, foreign_bytes
from towerd.store.tree.node import Node

_SEGMENTS = (
    "SELECT id, coalesce(parent, 0), scope, p0, p1, last_used, hits, ids FROM segments"
    " WHERE tokenizer = ? AND id IN (SELECT value FROM json_each(?))"
)
_VIEWS = (
    "SELECT node, file, row0 FROM views JOIN files ON files.id = file"
    " WHERE fingerprint = ? AND node IN (SELECT value FROM json_each(?))"
)
_FILES = (
    "SELECT id, name FROM files WHERE fingerprint = ? AND id IN (SELECT value FROM json_each(?))"
)


class _Row(NamedTuple):
    id: int
    parent: int
    scope: str
    p0: int
    p1: int
    last_used: float
    hits: int
    ids: bytes


@dataclass(frozen=True, slots=True)
class Replica:
    """What one process has in memory of a shared catalog. The store's lock is held around every
    call."""

    state: StoreState
    bases: BaseTable
    cold: ColdTable
    deletions: Deletions

    def apply(self, changed: Changed) -> None:
        """Change what is in memory as other processes changed the catalog. After an error the same
        changes can be applied again. Raises StoreError."""
        if ids := changed.get("segments"):
            self._apply_segments(ids)
        if ids := changed.get("files"):
            self._apply_files(ids)
        if "pins" in changed or "bases" in changed:
            self.bases.version += 1
            count_pins(self.state.catalog, self.state.tree)
        if ids := changed.get("cold"):
            self.cold.read_again(ids)
        for each in changed.get(DELETED, ()):
            self.deletions.note(Deletion(*each))

    # --- segments -------------------------------------------------------------------------

    def _apply_segments(self, ids: Collection[int]) -> None:
        rows = {row.id: row for row in self._rows(ids)}
        nodes = self.state.tree.nodes
        gone = [nodes[id] for id in ids if id in nodes and id not in rows]
        for node in sorted(gone, key=lambda each: -each.p0):
            detach(self.state, node)
            self.state.listener.removed(node)
        for row in rows.values():
            if row.id in nodes and row.p0 > nodes[row.id].p0:
                self._split(nodes[row.id], row, rows)
        new = sorted((row for row in rows.values() if row.id not in nodes), key=lambda row: row.p0)
        for row in new:
            self._add(row)
        self._view(list(rows))

    def _rows(self, ids: Collection[int]) -> Iterator[_Row]:
        mine = self.state.identity.tokenizer
        for row in self.state.catalog.rows(_SEGMENTS, (mine, _keys(ids))):
            yield _Row(*row)

    def _split(self, lower: Node, row: _Row, rows: dict[int, _Row]) -> None:
        """Split a node wherever others did: above it are new ones, up to its old beginning."""
        above: list[_Row] = []
        parent = row.parent
        while not above or above[-1].p0 > lower.p0:
            above.append(rows[parent])
            parent = above[-1].parent
        for each in reversed(above):
            upper = self.state.tree.split(lower, each.p1, each.id)
            self.state.listener.split(lower, upper)

    def _add(self, row: _Row) -> None:
        tree = self.state.tree
        parent = tree.nodes[row.parent] if row.parent else tree.root
        node = Node(row.id, parent, row.scope, row.p0, row.ids)
        node.last_used, node.hits = row.last_used, row.hits
        tree.add(node)

    def _view(self, ids: Sequence[int]) -> None:
        """Give new nodes the rows that this model has of them, which were those of a longer one."""
        tree, files, mine = self.state.tree, self.state.files, self.state.identity.row_identity
        for id, file, row0 in self.state.catalog.rows(_VIEWS, (mine, _keys(ids))):
            if file in files and tree.nodes[id].file is None:
                tree.view(tree.nodes[id], files[file], row0)
                self.state.listener.became_warm(files[file], [tree.nodes[id]])

    # --- files ----------------------------------------------------------------------------

    def _apply_files(self, ids: Collection[int]) -> None:
        """Forget files of this model that others deleted, and count those of other models."""
        state = self.state
        if mine := {id for id in ids if id in state.files}:
            # an id may be another file's by now; names are never used again
            there = dict(state.catalog.rows(_FILES, (state.identity.row_identity, _keys(mine))))
            for id in mine:
                if there.get(id) != state.files[id].path.name:
                    state.forget_file(state.files[id])
        state.foreign_bytes = foreign_bytes(state.catalog, state.identity.row_identity)


def _keys(ids: Collection[int]) -> str:
    return msgspec.json.encode(list(ids)).decode()
