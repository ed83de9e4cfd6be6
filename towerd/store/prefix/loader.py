"""Loading the prefix tree from the catalog at start."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from sys import intern

from towerd.slots.errors import StateError
from towerd.slots.fingerprint import Fingerprint
from towerd.store.catalog.catalog import Catalog
from towerd.store.prefix.node import Node
from towerd.store.prefix.scope import public_of
from towerd.store.prefix.trie import Trie
from towerd.store.segments.directory import Directory
from towerd.store.segments.format_run import decode_runs
from towerd.store.segments.segment_file import Mappings, SegmentFile
from towerd.store.state import StoreState


def load_state(
    directory: Directory, catalog: Catalog, fingerprint: Fingerprint, clock: Callable[[], float]
) -> StoreState:
    """Load the state of an opened store for one fingerprint, which is entered if it is new."""
    pk = catalog.enter_fingerprint(fingerprint, clock())
    mappings = Mappings()
    files = load_files(catalog, pk, directory.segments, mappings)
    state = StoreState(
        directory,
        catalog,
        fingerprint,
        fingerprint.digest(),
        pk,
        clock,
        mappings,
        threading.RLock(),
        load_trie(catalog, pk, files),
        files,
        warm_bytes=sum(file.nbytes for file in files.values()),
    )
    directory.sweep_tmp()
    return state


def load_files(
    catalog: Catalog, fingerprint: int, folder: Path, mappings: Mappings
) -> dict[int, SegmentFile]:
    """The files of one fingerprint by id; nothing is opened."""
    files = {}
    for id, name, p0, n_rows, n_bytes, text in catalog.rows(
        "SELECT id, name, p0, n_rows, bytes, runs FROM files WHERE fingerprint = ?",
        (fingerprint,),
    ):
        if "/" in name or name in ("", ".", "..") or "\0" in name:
            raise catalog.damaged(f"file {id} has an impossible name")
        try:
            runs = decode_runs(text, n_rows)
        except StateError as error:
            raise catalog.damaged(f"file {id}: {error}") from error
        files[id] = SegmentFile(id, folder / name, p0, n_rows, n_bytes, mappings, runs)
    return files


def load_trie(catalog: Catalog, fingerprint: int, files: dict[int, SegmentFile]) -> Trie:
    """The trie of one fingerprint. Raises StoreError if the rows contradict each other."""
    trie = Trie()
    with _no_collections():
        parents = _load_nodes(catalog, fingerprint, files, trie)
        _link(catalog, trie, parents)
    for table in ("pins", "bases"):
        for (id,) in catalog.rows(f"SELECT node FROM {table}"):
            node = trie.nodes.get(id)
            if node is not None:  # else another fingerprint's
                add_pins(node, 1)
    return trie


def add_pins(node: Node, n: int) -> None:
    """Count `n` more pins on `node` and everything above it."""
    for each in node.path():
        each.pins += n


def _load_nodes(
    catalog: Catalog, fingerprint: int, files: dict[int, SegmentFile], trie: Trie
) -> list[int | None]:
    """Create every node, unlinked; returns the parent ids in the order of `trie.nodes`."""
    nodes, parents = trie.nodes, []
    for id, parent, scope, p0, file_id, row0, n_rows, last_used, hits, ids in catalog.rows(
        "SELECT id, parent, scope, p0, file, file_row0, file_rows, last_used, hits, ids"
        " FROM segments WHERE fingerprint = ?",
        (fingerprint,),
    ):
        nodes[id] = node = Node(id, None, intern(scope), p0, ids)
        node.last_used, node.hits = last_used, hits
        parents.append(parent)
        if file_id is None:
            continue
        file = files.get(file_id)
        if file is None or n_rows != node.n or row0 + n_rows > file.n_rows:
            raise catalog.damaged(f"segment {id} views rows that no file has")
        if file.p0 + row0 != p0 or row0 < 0:
            raise catalog.damaged(f"segment {id} views the rows of other positions")
        trie.view(node, file, row0)
    return parents


def _link(catalog: Catalog, trie: Trie, parents: list[int | None]) -> None:
    nodes = trie.nodes
    for node, parent_id in zip(nodes.values(), parents, strict=True):
        parent = trie.root if parent_id is None else nodes.get(parent_id)
        if parent is None or parent.p1 != node.p0 or not _may_follow(parent, node):
            raise catalog.damaged(f"segment {node.id} does not continue its parent")
        node.parent = parent
        place = (node.scope, node.first)
        if parent.by_token is None:
            parent.by_token = {place: node}
        elif parent.by_token.setdefault(place, node) is not node:
            raise catalog.damaged(f"segments {node.id} and its sibling begin alike")


def _may_follow(parent: Node, node: Node) -> bool:
    """Whether the parent is the root, public, or of the same scope."""
    return not parent.id or parent.scope in (node.scope, public_of(node.scope))


@contextmanager
def _no_collections() -> Iterator[None]:
    """Pause the garbage collector: many objects are created and none is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
