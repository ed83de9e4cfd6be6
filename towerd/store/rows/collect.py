"""Garbage collection of unneeded segments, unviewed files and old quarantined files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from towerd.errors import DiskFull
from towerd.store.catalog.catalog import Catalog
from towerd.store.files.directory import remove_file
from towerd.store.rows.checkpoint_check import stray_checkpoints
from towerd.store.rows.rows import uncatalogue
from towerd.store.segments.segment_file import SegmentFile
from towerd.store.state.loader import foreign_bytes, load_foreign
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was removed, or would be."""

    segments: int
    files: int
    bytes_freed: int
    """Bytes of segment files, checkpoints, orphans, temporary and quarantined files,
    without the catalog."""


def collect(
    state: StoreState,
    quarantine_days: float,
    writing: Collection[str],
    *,
    dry_run: bool = False,
) -> GcReport:
    """Remove leaves until every leaf is needed, then the files that nothing views. Runs under
    the lock. With `dry_run` only report."""
    doomed = _unneeded(state)
    elsewhere = list(_unneeded_elsewhere(state))
    ids = {node.id for nodes in (doomed, *(nodes for _, nodes in elsewhere)) for node in nodes}
    viewers = state.tree.viewers
    unviewed = [file for file in state.files.values() if all(n.id in ids for n in viewers(file))]
    strays = orphans(state, writing)
    checkpoints = stray_checkpoints(state, writing, ids)
    n_files = len(unviewed) + len(strays) + len(checkpoints)
    directory = state.directory
    if dry_run:
        names = [file.path.name for file in unviewed] + list(strays)
        freed = sum(directory.size(name) for name in names)
        freed += sum(path.stat().st_size for path in checkpoints)
        return GcReport(len(ids), n_files, freed + directory.leftovers(writing, quarantine_days))
    freed = 0
    for other, nodes in elsewhere:
        with state.catalog.transaction():
            foreign = delete(other, nodes, [])
        freed += forget(other, nodes, [], foreign)
    with state.catalog.transaction():
        foreign = delete(state, doomed, unviewed)
    freed += forget(state, doomed, unviewed, foreign)
    state.foreign_bytes = foreign_bytes(state.catalog, state.identity.fingerprint)
    freed += sum(directory.remove(name) for name in strays)
    freed += sum(remove_file(path) for path in checkpoints)
    freed += directory.sweep_tmp(writing)
    freed += directory.empty_quarantine(quarantine_days)
    state.catalog.shrink()
    return GcReport(len(ids), n_files, freed)


def delete(
    state: StoreState, doomed: Sequence[Node], unviewed: Sequence[SegmentFile]
) -> list[tuple[str, int]]:
    """Delete nodes, children before their parents, and files from the catalog, inside a
    transaction; returns the names and bytes of the files of other fingerprints that nothing views any more,
    which are deleted too. Call `forget` once it is durable."""
    run_many, nodes = state.catalog.run_many, [(node.id,) for node in doomed]
    foreign: set[tuple[int, str, int]] = set()
    for node in nodes:
        foreign.update(state.catalog.rows(_FOREIGN, (*node, state.identity.fingerprint)))
    run_many("DELETE FROM views WHERE node = ?", nodes)
    run_many("DELETE FROM segments WHERE id = ?", nodes)
    run_many("DELETE FROM files WHERE id = ?", [(file.id,) for file in unviewed])
    unneeded = []
    for id, name, n_bytes in foreign:
        if not state.catalog.rows("SELECT 1 FROM views WHERE file = ? LIMIT 1", (id,)):
            state.catalog.run("DELETE FROM files WHERE id = ?", (id,))
            unneeded.append((name, n_bytes))
    return unneeded


_FOREIGN = (
    "SELECT files.id, name, bytes FROM views JOIN files ON files.id = file"
    " WHERE node = ? AND fingerprint != ?"
)


def forget(
    state: StoreState,
    doomed: Sequence[Node],
    unviewed: Sequence[SegmentFile],
    foreign: Sequence[tuple[str, int]],
) -> int:
    """Remove what `delete` removed from memory and disk; returns the bytes that the files had."""
    for node in doomed:
        detach(state, node)
        state.listener.removed(node)
    freed = 0
    for file in unviewed:
        state.forget_file(file)
        freed += state.directory.remove(file.path.name)
    for name, n_bytes in foreign:
        state.foreign_bytes -= n_bytes
        freed += state.directory.remove(name)
    return freed


def drop_foreign(state: StoreState, bytes_needed: int) -> int:
    """Delete files of other fingerprints: of those that no process has open, least recently used
    fingerprint and file first; then, while another open model has more than this one, the files of
    the largest that were used least recently and are not pinned. Returns the bytes freed."""
    sizes = dict.fromkeys(state.catalog.open_elsewhere(), 0)
    freed = 0
    for of, id, name, n_bytes in state.catalog.rows(_FOREIGN_FILES, (state.identity.fingerprint,)):
        if of in sizes:
            sizes[of] += n_bytes
        elif freed < bytes_needed:
            freed += drop_foreign_file(state, id, name, n_bytes)
    if freed < bytes_needed and sizes:
        freed += _drop_of_larger(state, bytes_needed - freed, sizes)
    return freed


def _drop_of_larger(state: StoreState, bytes_needed: int, sizes: dict[int, int]) -> int:
    """`sizes`: bytes of all files of each model that another process has open."""
    files: dict[int, list[tuple[int, str, int]]] = {of: [] for of in sizes}
    for of, id, name, n_bytes in state.catalog.rows(_LIVE_FILES, (_ids(sizes),)):
        files[of].append((id, name, n_bytes))
    freed = 0
    while freed < bytes_needed and sizes:
        largest = max(sizes, key=lambda of: sizes[of])
        if sizes[largest] <= state.warm_bytes or not files[largest]:
            del sizes[largest]
            continue
        id, name, n_bytes = files[largest].pop(0)
        sizes[largest] -= n_bytes
        freed += drop_foreign_file(state, id, name, n_bytes)
    return freed


_FOREIGN_FILES = (
    "SELECT fingerprint, files.id, name, bytes FROM files JOIN fingerprints"
    " ON fingerprints.id = fingerprint WHERE fingerprint != ? ORDER BY opened, files.created"
)
_LIVE_FILES = (
    "WITH RECURSIVE pinned(node) AS (SELECT node FROM pins UNION SELECT node FROM bases"
    " UNION SELECT parent FROM segments JOIN pinned ON id = node WHERE parent IS NOT NULL)"
    " SELECT fingerprint, files.id, name, bytes FROM files"
    " JOIN views ON file = files.id JOIN segments ON segments.id = views.node"
    " WHERE fingerprint IN (SELECT value FROM json_each(?))"
    " AND NOT EXISTS (SELECT 1 FROM views AS v JOIN pinned ON pinned.node = v.node"
    " WHERE v.file = files.id) GROUP BY files.id ORDER BY max(last_used)"
)


def _ids(keys: Collection[int]) -> str:
    return msgspec.json.encode(list(keys)).decode()


def drop_foreign_file(state: StoreState, id: int, name: str, n_bytes: int) -> int:
    """Delete a file of another fingerprint; returns its bytes. Runs under the lock."""
    try:
        uncatalogue(state.catalog, id)
    except DiskFull:
        # as for files of one's own: that it can be deleted matters most now
        state.directory.remove(name)
        with suppress(DiskFull):
            uncatalogue(state.catalog, id)
    state.directory.remove(name)
    state.foreign_bytes -= n_bytes
    return n_bytes


_UNNEEDED = (
    "SELECT 1 FROM segments AS s"
    " WHERE NOT EXISTS (SELECT 1 FROM segments WHERE parent = s.id)"
    " AND NOT EXISTS (SELECT 1 FROM turns WHERE prompt_node = s.id)"
    " AND NOT EXISTS (SELECT 1 FROM turns WHERE reply_node = s.id)"
    " AND NOT EXISTS (SELECT 1 FROM pins WHERE node = s.id)"
    " AND NOT EXISTS (SELECT 1 FROM bases WHERE node = s.id)"
    " AND NOT EXISTS (SELECT 1 FROM cold WHERE base = s.id)"
)
_WITH_UNNEEDED = (
    "SELECT id, digest FROM tokenizers"
    f" WHERE id != ? AND EXISTS ({_UNNEEDED} AND s.tokenizer = tokenizers.id)"
)


def has_unneeded(catalog: Catalog) -> bool:
    """Whether there are segments that only running requests need, or that came since a collection."""
    return bool(catalog.rows(f"{_UNNEEDED} LIMIT 1"))


def _unneeded_elsewhere(state: StoreState) -> Iterator[tuple[StoreState, list[Node]]]:
    """The state of each other tokenizer of which some segments are unneeded, and these."""
    for pk, digest in state.catalog.rows(_WITH_UNNEEDED, (state.identity.tokenizer,)):
        other = load_foreign(state, pk, digest)
        yield other, _unneeded(other)


def _unneeded(state: StoreState) -> list[Node]:
    """The nodes to remove, children before their parents."""
    needed = {node.id for node in list(state.tree.held.values())}
    needed |= set(state.catalog.held_elsewhere())
    for (id,) in state.catalog.rows(
        "SELECT prompt_node FROM turns UNION SELECT reply_node FROM turns"
        " UNION SELECT node FROM pins UNION SELECT node FROM bases UNION SELECT base FROM cold"
    ):
        needed.add(id)
    doomed: list[Node] = []
    n_children = {id: len(node.children) for id, node in state.tree.nodes.items()}
    leaves = [node for id, node in state.tree.nodes.items() if n_children[id] == 0]
    while leaves:
        node = leaves.pop()
        if node.id in needed:
            continue
        doomed.append(node)
        parent = node.parent
        if parent is not None and parent.parent is not None:
            n_children[parent.id] -= 1
            if n_children[parent.id] == 0:
                leaves.append(parent)
    return doomed


def detach(state: StoreState, node: Node) -> None:
    """Remove a leaf and its rows from memory."""
    if node.hot is not None:
        state.hot_bytes -= node.hot.nbytes
        node.hot = None
    state.tree.unview(node)
    state.touched.discard(node)
    state.tree.remove(node)


def orphans(state: StoreState, writing: Collection[str]) -> set[str]:
    """Files that the catalog does not list, left by a crash between rename and commit."""
    known = {name for (name,) in state.catalog.rows("SELECT name FROM files")}
    return state.directory.names() - known - set(writing)
