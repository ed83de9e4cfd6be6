"""Removing segment files from the catalog."""

from __future__ import annotations

from collections.abc import Sequence

from towerd.store.catalog.catalog import Catalog
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node


def uncatalogue(catalog: Catalog, file_id: int) -> None:
    """Remove a file from the catalog; its segments keep their tokens."""
    with catalog.transaction():
        _remove(catalog, file_id)


def uncatalogue_forgotten(state: StoreState, nodes: Sequence[Node]) -> None:
    """Remove the files that `nodes` view in the catalog alone, in the transaction that gives them
    another: a file goes without the catalog when the disk is full, and a segment that viewed two
    would keep the store from being opened again."""
    sql = "SELECT file FROM views JOIN files ON files.id = file WHERE node = ? AND fingerprint = ?"
    of = state.identity.row_identity
    viewed = {id for node in nodes for (id,) in state.catalog.rows(sql, (node.id, of))}
    for file_id in sorted(viewed - state.files.keys()):
        _remove(state.catalog, file_id)


def _remove(catalog: Catalog, file_id: int) -> None:
    catalog.run("DELETE FROM views WHERE file = ?", (file_id,))
    catalog.run("DELETE FROM files WHERE id = ?", (file_id,))
