"""Garbage collection of unneeded segments, unviewed files and old quarantined files; and the segments
that only one session needs, which can be removed once its tokens are coded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from towerd.errors import DiskFull
from towerd.store.catalog.catalog import Catalog
from towerd.store.files.directory import file_size, remove_file
from towerd.store.rows.checkpoints import stray_checkpoints
from towerd.store.rows.uncatalogue import uncatalogue
from towerd.store.segments.coded_format import bases_in
from towerd.store.segments.segment_file import SegmentFile
from towerd.store.segments.transform_bases import TransformBases
from towerd.store.state.state import StoreState, foreign_bytes, load_foreign
from towerd.store.tree.node import Node
from towerd.store.tree.tree import PrefixTree

BASE_TOKENS_MIN = 32
"""A shorter prefix is coded with the rest: a reference to it would take as many bytes."""

_OTHERS = (
    "SELECT 1 FROM turns WHERE prompt_node = ? AND session != ?"
    " UNION ALL SELECT 1 FROM turns WHERE reply_node = ? AND session != ?"
    " UNION ALL SELECT 1 FROM cold WHERE base = ? AND session != ? LIMIT 1"
)


@dataclass(slots=True)
class OtherUsers:
    """Finds out what needs a segment besides one session. The store's lock is held around
    every call."""

    state: StoreState
    session: int

    def is_end(self, node: Node) -> bool:
        """Whether a turn of another session ends at `node`, or its blob continues from it."""
        return bool(self.state.catalog.rows(_OTHERS, (node.id, self.session) * 3))

    def holds(self, node: Node) -> bool:
        """Whether anything else needs `node`: a pin, a base, or another session here or below."""
        stack = [node]
        while stack:
            each = stack.pop()
            if each.pinned or self.is_end(each):
                return True
            stack += each.children
        return False

    def shares(self, node: Node, own: Collection[int]) -> bool:
        """Whether a segment of the session, whose nodes are `own`, is shared with another user."""
        if node.pinned or self.is_end(node):
            return True
        return any(child.id not in own and self.holds(child) for child in node.children)


def common_base(needs: OtherUsers, leaf: Node, own: Collection[int]) -> Node | None:
    """The deepest segment on the path of `leaf` that others need too; None if its prefix is too
    short."""
    for node in reversed(leaf.path()):
        if node.p1 < BASE_TOKENS_MIN:
            break
        if needs.shares(node, own):
            return node
    return None


def own_nodes(state: StoreState, session: int) -> list[Node]:
    """Every segment on the paths of a session's turns, children before their parents."""
    found: dict[int, Node] = {}
    for prompt_node, reply_node in state.catalog.rows(
        "SELECT prompt_node, reply_node FROM turns WHERE session = ?", (session,)
    ):
        for id in (prompt_node, reply_node):
            node = state.tree.nodes.get(id)
            while node is not None and node.parent is not None and node.id not in found:
                found[node.id] = node
                node = node.parent
    return sorted(found.values(), key=lambda node: -node.p1)


def unneeded(needs: OtherUsers, own: Sequence[Node], base: Node | None) -> list[Node]:
    """The session's own segments and their descendants that nothing else needs, children
    before their parents. `base` stays, because the session's blob needs it."""
    kept = set() if base is None else {node.id for node in base.path()}
    mine = {node.id for node in own}
    doomed: dict[int, Node] = {}
    for node in own:
        if node.id in kept or node.pinned or needs.is_end(node):
            continue
        others = [child for child in node.children if child.id not in doomed]
        if any(child.id in mine or needs.holds(child) for child in others):
            continue
        for child in others:
            doomed |= {each.id: each for each in _subtree(child)}
        doomed[node.id] = node
    return list(doomed.values())


def unviewed(tree: PrefixTree, doomed: Sequence[Node]) -> list[SegmentFile]:
    """Files that only these segments view."""
    ids = {node.id for node in doomed}
    files = {node.file.id: node.file for node in doomed if node.file is not None}
    return [f for f in files.values() if all(node.id in ids for node in tree.viewers(f))]


def _subtree(node: Node) -> list[Node]:
    """A node and all its descendants, children before their parents."""
    found = [node]
    for each in found:
        found += each.children
    return found[::-1]


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was removed, or would be."""

    segments: int
    files: int
    bytes_freed: int
    """Bytes of segment files, checkpoints, transform bases, media, orphans, temporary and quarantined files,
    without the catalog."""

    def with_files(self, paths: Collection[Path]) -> GcReport:
        """This, and files that are removed besides."""
        n_bytes = self.bytes_freed + sum(file_size(path) for path in paths)
        return replace(self, files=self.files + len(paths), bytes_freed=n_bytes)


def collect(
    state: StoreState,
    bases: TransformBases,
    quarantine_days: float,
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
    strays = orphans(state)
    checkpoints = stray_checkpoints(state, ids)
    n_files = len(unviewed) + len(strays) + len(checkpoints)
    directory = state.directory
    if dry_run:
        names = [file.path.name for file in unviewed] + list(strays)
        freed = sum(directory.size(name) for name in names)
        freed += sum(path.stat().st_size for path in checkpoints)
        freed += sum(path.stat().st_size for path in bases.unneeded(needed_bases(state.catalog)))
        return GcReport(
            len(ids), n_files, freed + directory.leftovers(state.catalog.writing, quarantine_days)
        )
    freed = 0
    for other, nodes in elsewhere:
        with state.catalog.transaction():
            foreign = delete(other, nodes, [])
        freed += forget(other, nodes, [], foreign)
    with state.catalog.transaction():
        foreign = delete(state, doomed, unviewed)
    freed += forget(state, doomed, unviewed, foreign)
    state.foreign_bytes = foreign_bytes(state.catalog, state.identity.row_identity)
    freed += sum(directory.remove(name) for name in strays)
    freed += sum(remove_file(path) for path in checkpoints)
    freed += sum(map(bases.remove, bases.unneeded(needed_bases(state.catalog))))
    freed += directory.sweep_tmp(state.catalog.writing)
    freed += directory.empty_quarantine(quarantine_days)
    state.catalog.shrink()
    return GcReport(len(ids), n_files, freed)


CODING_META = "transform:"
"""What the keys begin with under which the catalog keeps the codings in use, by row identity."""


def needed_bases(catalog: Catalog) -> set[str]:
    """The names of the transform bases that any file, of whatever model, was written with, or that are in
    use."""
    texts = catalog.rows(
        "SELECT runs FROM files WHERE runs LIKE '%t:%' UNION SELECT value FROM meta WHERE key LIKE ?",
        (f"{CODING_META}%",),
    )
    return {name for (text,) in texts for name in bases_in(text)}


def delete(
    state: StoreState, doomed: Sequence[Node], unviewed: Sequence[SegmentFile]
) -> list[tuple[str, int]]:
    """Delete nodes, children before their parents, and files from the catalog, inside a
    transaction; returns the names and bytes of the files of other row identities that nothing views
    any more, which are deleted too. Call `forget` once it is durable."""
    run_many, nodes = state.catalog.run_many, [(node.id,) for node in doomed]
    foreign: set[tuple[int, str, int]] = set()
    for node in nodes:
        foreign.update(state.catalog.rows(_FOREIGN, (*node, state.identity.row_identity)))
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
    """Delete files of other row identities: of those that no process has open, least recently used
    identity and file first; then, while another open model has more than this one, the files of
    the largest that were used least recently and are not pinned. Returns the bytes freed."""
    with state.locked():
        return _drop_foreign(state, bytes_needed)


def _drop_foreign(state: StoreState, bytes_needed: int) -> int:
    sizes = dict.fromkeys(state.catalog.open_elsewhere(), 0)
    freed = 0
    for of, id, name, n_bytes in state.catalog.rows(_FOREIGN_FILES, (state.identity.row_identity,)):
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
    """Delete a file of another row identity; returns its bytes. Runs under the lock."""
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
    "SELECT s.id FROM segments AS s"
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


def unneeded_ids(catalog: Catalog) -> set[int]:
    """The segments of which `has_unneeded` tells."""
    return {row[0] for row in catalog.rows(_UNNEEDED)}


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


def orphans(state: StoreState) -> set[str]:
    """Files that the catalog does not list, left by a crash between rename and commit."""
    known = {name for (name,) in state.catalog.rows("SELECT name FROM files")}
    # names are listed first: the name of a file is told before the file is made
    return state.directory.names() - known - set(state.catalog.writing())
