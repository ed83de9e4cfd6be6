"""Loading the prefix tree from the catalog at start."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from sys import intern

from towerd.slots.errors import StateError
from towerd.store.catalog.catalog import Catalog, EnteredIdentity, Lock
from towerd.store.catalog.identity import ModelIdentity
from towerd.store.files.directory import Directory
from towerd.store.segments.format_run import decode_runs
from towerd.store.segments.segment_file import SegmentFile
from towerd.store.state.state import StoreState
from towerd.store.tree.listener import Listener
from towerd.store.tree.node import Node
from towerd.store.tree.scope import public_of
from towerd.store.tree.tree import PrefixTree


def load_state(
    directory: Directory,
    catalog: Catalog,
    identity: ModelIdentity,
    clock: Callable[[], float],
    lock: Lock,
) -> StoreState:
    """Load the state of an opened store for one model, whose fingerprint and tokenizer are entered
    if they are new: the prefix tree of the tokenizer, and the rows of the fingerprint. `lock`, which
    is held, will guard it."""
    entered = catalog.enter(identity, clock())
    catalog.open_model(entered)
    files = load_files(catalog, entered.fingerprint, directory.segments)
    return StoreState(
        directory,
        catalog,
        identity.fingerprint,
        identity.fingerprint.digest(),
        entered,
        clock,
        lock,
        load_tree(catalog, entered, files),
        files,
        warm_bytes=sum(file.nbytes for file in files.values()),
        foreign_bytes=foreign_bytes(catalog, entered.fingerprint),
    )


def load_foreign(state: StoreState, tokenizer: int, digest: bytes) -> StoreState:
    """The state of an open store for a tokenizer that is not the open one, to enter sessions with:
    its prefix tree without rows. It is valid while the lock is held."""
    of = EnteredIdentity(0, tokenizer, digest)
    tree = load_tree(state.catalog, of, {})
    return replace(state, identity=of, tree=tree, files={}, listener=Listener())


def foreign_bytes(catalog: Catalog, fingerprint: int) -> int:
    """Bytes of the files of every other fingerprint."""
    sql = "SELECT coalesce(sum(bytes), 0) FROM files WHERE fingerprint != ?"
    return int(catalog.rows(sql, (fingerprint,))[0][0])


def load_files(catalog: Catalog, fingerprint: int, folder: Path) -> dict[int, SegmentFile]:
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
        files[id] = SegmentFile(id, folder / name, p0, n_rows, n_bytes, runs)
    return files


def load_tree(catalog: Catalog, of: EnteredIdentity, files: dict[int, SegmentFile]) -> PrefixTree:
    """The tree of one tokenizer with the rows of one fingerprint, whose files are `files`. Raises
    StoreError if the catalog contradicts itself."""
    tree = PrefixTree()
    with _no_collections():
        parents = _load_nodes(catalog, of.tokenizer, tree)
        _link(catalog, tree, parents)
        _load_views(catalog, of.fingerprint, files, tree)
    count_pins(catalog, tree)
    return tree


def count_pins(catalog: Catalog, tree: PrefixTree) -> None:
    """Count the pins and bases at or below every node."""
    for node in tree.nodes.values():
        node.pins = 0
    for table in ("pins", "bases"):
        for (id,) in catalog.rows(f"SELECT node FROM {table}"):
            pinned = tree.nodes.get(id)
            if pinned is not None:  # else another tokenizer's
                add_pins(pinned, 1)


def add_pins(node: Node, n: int) -> None:
    """Count `n` more pins on `node` and everything above it."""
    for each in node.path():
        each.pins += n


def _load_nodes(catalog: Catalog, tokenizer: int, tree: PrefixTree) -> list[int | None]:
    """Create every node, unlinked; returns the parent ids in the order of `tree.nodes`."""
    nodes, parents = tree.nodes, []
    for id, parent, scope, p0, last_used, hits, ids in catalog.rows(
        "SELECT id, parent, scope, p0, last_used, hits, ids FROM segments WHERE tokenizer = ?",
        (tokenizer,),
    ):
        nodes[id] = node = Node(id, None, intern(scope), p0, ids)
        node.last_used, node.hits = last_used, hits
        parents.append(parent)
    return parents


def _load_views(
    catalog: Catalog, fingerprint: int, files: dict[int, SegmentFile], tree: PrefixTree
) -> None:
    """Give the nodes their rows on disk."""
    for id, file_id, row0 in catalog.rows(
        "SELECT node, file, row0 FROM views JOIN files ON files.id = file WHERE fingerprint = ?",
        (fingerprint,),
    ):
        node, file = tree.nodes.get(id), files[file_id]
        if node is None or node.file is not None or row0 < 0 or row0 + node.n > file.n_rows:
            raise catalog.damaged(f"segment {id} views rows that no file has")
        if file.p0 + row0 != node.p0:
            raise catalog.damaged(f"segment {id} views the rows of other positions")
        tree.view(node, file, row0)


def _link(catalog: Catalog, tree: PrefixTree, parents: list[int | None]) -> None:
    nodes = tree.nodes
    for node, parent_id in zip(nodes.values(), parents, strict=True):
        parent = tree.root if parent_id is None else nodes.get(parent_id)
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
