"""The state shared by all parts of an open store; how it is loaded from the catalog, and how a path grows
in it: splits and new nodes, in the catalog and in memory."""

from __future__ import annotations

import gc
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

from towerd.errors import NotFound, StoreError
from towerd.slots.errors import StateError
from towerd.slots.row_identity import RowIdentity
from towerd.store.catalog.catalog import Catalog, EnteredIdentity, Lock, Undo
from towerd.store.catalog.identity import ModelIdentity
from towerd.store.files.directory import Directory
from towerd.store.files.file_map import StoreFiles
from towerd.store.segments.segment_file import FormatTally, SegmentFile
from towerd.store.segments.segment_header import FormatRun, decode_runs, key_hash, segment_key
from towerd.store.tree.node import Node
from towerd.store.tree.scope import public_of
from towerd.store.tree.tree import Listener, PrefixTree
from towerd.tokens import ID_BYTES


@dataclass(slots=True)
class Growth:
    """One path being inserted inside a catalog transaction; `undo` reverts it in memory."""

    state: StoreState
    now: float
    undo: Undo
    splits: list[tuple[Node, Node]] = field(default_factory=list)
    """(lower, upper) of every split made."""

    def grow(self, ids: bytes, scope: str, ends: Sequence[int]) -> list[Node]:
        """Ensure that a path for `ids` exists with node ends at each of `ends` (ascending,
        the last is the length of `ids`); returns it."""
        return self._grow(ids, scope, ends)[ends[-1]].path()

    def grow_turn(
        self, ids: bytes, scope: str, n_prompt: int, n_cached: int, n_base: int = 0
    ) -> tuple[Node, Node]:
        """Insert the path of a turn of which the first `n_cached` tokens have rows. Returns
        its prompt end and its reply end, each capped at `n_cached` (the root for 0). A node ends behind
        the first `n_base` tokens, too."""
        ends = sorted({min(n_base, n_cached), min(n_prompt, n_cached), n_cached} - {0})
        at = self._grow(ids[: n_cached * ID_BYTES], scope, ends) if ends else {}
        at[0] = self.state.tree.root
        return at[min(n_prompt, n_cached)], at[n_cached]

    def _grow(self, ids: bytes, scope: str, ends: Sequence[int]) -> dict[int, Node]:
        """By their ends, nodes of the path for `ids`: among them those that end at `ends`."""
        last, n = self.state.tree.longest(ids, scope)
        at = self._cut(last, n, ids, ends)
        node = at[n]
        tower = self.state.tree.tower_ends.get(node)
        hash = None if tower is None else tower.hash
        for end in ends:
            if end > n:
                hash = self._hash(hash, node, scope, ids[: end * ID_BYTES])
                node = at[end] = self._add(
                    node, scope, ids[node.p1 * ID_BYTES : end * ID_BYTES], hash
                )
        if hash is not None and node.p1 == ends[-1]:
            self.state.tree.tower_ends.add(node, ids, hash)
        return at

    def _cut(self, last: Node, n: int, ids: bytes, ends: Sequence[int]) -> dict[int, Node]:
        """Split the nodes above `last`, of which the first `n` tokens match, at every end, and the
        last where the match stops. By their ends, the nodes from the first end or `n` on."""
        crossing: list[Node] = []
        node = last
        while node.p1 > min(ends[0], n):
            assert node.parent is not None
            crossing.append(node)
            node = node.parent
        at = {node.p1: node}
        for node in reversed(crossing):
            stop = min(node.p1, n)
            inside = ends[bisect_right(ends, node.p0) : bisect_right(ends, stop)]
            for end in sorted({*inside, stop} - {node.p1}):
                at[end] = self._split(node, end, ids[: end * ID_BYTES])
            if node.p1 <= n:
                at[node.p1] = node
        return at

    def _hash(
        self, before: hashlib.blake2b | None, parent: Node, scope: str, prefix: bytes
    ) -> hashlib.blake2b:
        """The hash that gives the key of `prefix`. `before` is the hash of the part up to the
        end of `parent`."""
        if before is None:
            hash = key_hash(self.state.identity.tokenizer_digest, scope)
            hash.update(prefix)
            return hash
        hash = before.copy()
        hash.update(prefix[parent.p1 * ID_BYTES :])
        return hash

    def _split(self, node: Node, at: int, prefix: bytes) -> Node:
        assert node.parent is not None
        n = at - node.p0
        key = segment_key(self.state.identity.tokenizer_digest, node.scope, prefix)
        ids = node.ids[: n * ID_BYTES]
        upper_id = self._enter(node.parent, node.scope, ids, key, node.last_used, node.hits)
        self.state.catalog.run(
            "UPDATE segments SET parent = ?, p0 = ?, ids = ? WHERE id = ?",
            (upper_id, at, node.ids[n * ID_BYTES :], node.id),
        )
        # of every row identity, not just the one that is open
        self.state.catalog.run(
            "INSERT INTO views(node, file, row0) SELECT ?, file, row0 FROM views WHERE node = ?",
            (upper_id, node.id),
        )
        self.state.catalog.run("UPDATE views SET row0 = row0 + ? WHERE node = ?", (n, node.id))
        hot = node.hot
        upper = self.state.tree.split(node, at, upper_id)
        self.undo.append(lambda: self.state.tree.unsplit(node, upper, hot))
        self.splits.append((node, upper))
        return upper

    def _enter(
        self, parent: Node, scope: str, ids: bytes, key: bytes, last_used: float, hits: int
    ) -> int:
        """Enter a segment in the catalog; returns its id."""
        return self.state.catalog.insert(
            "segments",
            tokenizer=self.state.identity.tokenizer,
            parent=parent.id or None,
            scope=scope,
            p0=parent.p1,
            p1=parent.p1 + len(ids) // ID_BYTES,
            last_used=last_used,
            hits=hits,
            created=self.now,
            key=key,
            ids=ids,
        )

    def _add(self, parent: Node, scope: str, ids: bytes, hash: hashlib.blake2b) -> Node:
        id = self._enter(parent, scope, ids, hash.digest(), self.now, 0)
        node = Node(id, parent, scope, parent.p1, ids)
        node.last_used = self.now
        self.state.tree.add(node)
        self.undo.append(lambda: self.state.tree.remove(node))
        return node


class Held(NamedTuple):
    """How a segment's rows are kept."""

    format: str | None
    """`native`, a stored format, or several joined by "+", first rows first; None: no rows."""
    nbytes: int
    """Bytes of the rows; without rows, the bytes that native ones would take."""


@dataclass(slots=True)
class StoreState:
    """The prefix tree, catalog and files of one open store; `lock` guards everything below it and is
    never held during bulk file I/O."""

    directory: Directory
    catalog: Catalog
    row_identity: RowIdentity
    digest: bytes
    """The row identity's."""
    identity: EnteredIdentity
    clock: Callable[[], float]
    tree: PrefixTree
    files: dict[int, SegmentFile]
    formats: FormatTally
    """Of the rows in `files`."""
    hot_bytes: int = 0
    warm_bytes: int = 0
    """Files of this row identity on disk."""
    foreign_bytes: int = 0
    """Files of other row identities on disk."""
    dropped: list[SegmentFile] = field(default_factory=list)
    """Files that were dropped while rows of them were in use."""
    touched: set[Node] = field(default_factory=set)
    """Nodes whose last use is not in the catalog yet."""
    listener: Listener = field(default_factory=Listener)
    is_open: bool = True

    @property
    def lock(self) -> Lock:
        """The lock of the store, open or closed."""
        return self.catalog.lock

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of an open store. Raises StoreError if it is closed."""
        with self.lock:
            self.check_open()
            yield

    def check_open(self) -> None:
        """Raises StoreError if the store is closed."""
        if not self.is_open:
            raise StoreError("the store is closed")

    def node(self, node_id: int) -> Node:
        """The node with this id. Raises NotFound."""
        if (node := self.tree.nodes.get(node_id)) is None:
            raise NotFound(f"there is no segment {node_id}")
        return node

    def touch(self, node: Node) -> None:
        """Record a use of `node` and its ancestors; written to disk in batches."""
        now = self.clock()
        for each in node.path():
            each.last_used = now
            each.hits += 1
            self.touched.add(each)

    def flush(self) -> None:
        """Write the recorded uses to the catalog."""
        touched = [node for node in self.touched if not node.removed]
        if touched:
            with self.catalog.transaction():
                self.catalog.run_many(
                    "UPDATE segments SET last_used = max(last_used, ?), hits = max(hits, ?)"
                    " WHERE id = ?",
                    [(node.last_used, node.hits, node.id) for node in touched],
                )
        self.touched.clear()

    @contextmanager
    def growing(self) -> Iterator[Growth]:
        """A transaction that may grow the tree; splits are reported once it is durable."""
        with self.catalog.transaction() as undo:
            growth = Growth(self, self.clock(), undo)
            yield growth
        for lower, upper in growth.splits:
            self.listener.split(lower, upper)

    def insert(self, ids: bytes, scope: str, ends: Sequence[int]) -> list[Node]:
        """Make a path for `ids` with a node end at each of `ends`, as `Store.insert` does; runs under
        the lock."""
        with self.growing() as growth:
            path = growth.grow(ids, scope, ends)
        self.touch(path[-1])
        return path

    def held(self, node: Node) -> Held:
        """The format of a node's rows: in memory, else on disk, else none."""
        layout = self.row_identity.layout
        if node.hot is not None:
            names = [part.layout.format_name for part in node.hot]
            return Held("+".join(dict.fromkeys(names)), node.hot.nbytes)
        if node.file is None:
            return Held(None, node.n * layout.token_bytes)
        names = [run.format for run in self._runs(node)]
        return Held("+".join(dict.fromkeys(names)), self.file_bytes(node))

    def file_bytes(self, node: Node) -> int:
        """Bytes of a node's rows on disk; 0 if there are none."""
        return sum(nbytes for _, _, nbytes in self.parts(node))

    def parts(self, node: Node) -> Iterator[tuple[str, int, int]]:
        """(format, rows, bytes) of each run of a node's rows on disk."""
        first, end, layout = node.file_row0, node.file_row0 + node.n, self.row_identity.layout
        for run in self._runs(node):
            assert node.file is not None
            n = min(end, run.end) - max(first, run.row0)
            yield run.format, n, node.file.run_bytes(run, layout) * n // run.n_rows

    def _runs(self, node: Node) -> list[FormatRun]:
        """The runs of the node's file that hold its rows."""
        first, end = node.file_row0, node.file_row0 + node.n
        runs = () if node.file is None else node.file.runs
        return [run for run in runs if run.row0 < end and first < run.end]

    @property
    def dropped_bytes(self) -> int:
        """Bytes of dropped files whose rows are in use, such as by long chats: their disk is free once these
        are gone."""
        return sum(file.nbytes for file in self.dropped if file.is_mapped)

    def stats(self) -> dict[str, Any]:
        """Counts and sizes of the store's content."""
        catalog_bytes, journal_bytes = self.catalog.sizes()
        disk = self.catalog.rows("SELECT coalesce(sum(bytes), 0) FROM files")[0][0]
        return {
            "segments": len(self.tree),
            "tokens": sum(node.n for node in self.tree.nodes.values()),
            "files": len(self.files),
            "sessions": self._count("sessions"),
            "bases": self._count("bases"),
            "paths_held": len(self.tree.held),
            "hot_bytes": self.hot_bytes,
            "warm_bytes": self.warm_bytes,
            "warm_quantized_bytes": self.formats.quantized_bytes,
            "warm_coded_bytes": self.formats.coded_bytes,
            "dropped_bytes": self.dropped_bytes,
            "disk_bytes": int(disk),
            "catalog_bytes": catalog_bytes,
            "journal_bytes": journal_bytes,
        }

    def _count(self, table: str) -> int:
        sql = f"SELECT count(*) FROM {table} WHERE tokenizer = ?"
        return int(self.catalog.rows(sql, (self.identity.tokenizer,))[0][0])

    def forget_file(self, file: SegmentFile) -> None:
        """Remove a file from memory; rows that are still viewed stay readable."""
        nodes = tuple(self.tree.viewers(file))
        for node in nodes:
            self.tree.unview(node)
        file.dropped = True
        self.dropped = [each for each in (*self.dropped, file) if each.is_mapped]
        if self.files.pop(file.id, None) is not None:
            self.warm_bytes -= file.nbytes
            self.formats.remove(file)
            self.listener.left_warm(file, nodes)


def load_state(
    directory: Directory,
    catalog: Catalog,
    identity: ModelIdentity,
    clock: Callable[[], float],
) -> StoreState:
    """Load the state of an opened store for one model, whose row identity and tokenizer are entered
    if they are new: the prefix tree of the tokenizer, and the rows of the row identity. Runs under
    the lock."""
    entered = catalog.enter(identity, clock())
    catalog.open_model(entered)
    files = load_files(catalog, entered.row_identity, directory.segments, directory.files)
    return StoreState(
        directory,
        catalog,
        identity.row_identity,
        identity.row_identity.digest(),
        entered,
        clock,
        load_tree(catalog, entered, files),
        files,
        FormatTally(identity.row_identity.layout, files.values()),
        warm_bytes=sum(file.nbytes for file in files.values()),
        foreign_bytes=foreign_bytes(catalog, entered.row_identity),
    )


def load_foreign(state: StoreState, tokenizer: int, digest: bytes) -> StoreState:
    """The state of an open store for a tokenizer that is not the open one, to enter sessions with:
    its prefix tree without rows. It is valid while the lock is held."""
    of = EnteredIdentity(0, tokenizer, digest)
    tree = load_tree(state.catalog, of, {})
    none = FormatTally(state.row_identity.layout)
    return replace(state, identity=of, tree=tree, files={}, formats=none, listener=Listener())


def foreign_bytes(catalog: Catalog, row_identity: int) -> int:
    """Bytes of the files of every other row identity."""
    sql = "SELECT coalesce(sum(bytes), 0) FROM files WHERE fingerprint != ?"
    return int(catalog.rows(sql, (row_identity,))[0][0])


def load_files(
    catalog: Catalog, row_identity: int, folder: Path, how: StoreFiles
) -> dict[int, SegmentFile]:
    """The files of one row identity by id; nothing is opened."""
    files = {}
    for id, name, p0, n_rows, n_bytes, text in catalog.rows(
        "SELECT id, name, p0, n_rows, bytes, runs FROM files WHERE fingerprint = ?",
        (row_identity,),
    ):
        if "/" in name or name in ("", ".", "..") or "\0" in name:
            raise catalog.damaged(f"file {id} has an impossible name")
        try:
            runs = decode_runs(text, n_rows)
        except StateError as error:
            raise catalog.damaged(f"file {id}: {error}") from error
        files[id] = SegmentFile(id, folder / name, p0, n_rows, n_bytes, runs, how)
    return files


def load_tree(catalog: Catalog, of: EnteredIdentity, files: dict[int, SegmentFile]) -> PrefixTree:
    """The tree of one tokenizer with the rows of one row identity, whose files are `files`. Raises
    StoreError if the catalog contradicts itself."""
    tree = PrefixTree()
    with _no_collections():
        parents = _load_nodes(catalog, of.tokenizer, tree)
        _link(catalog, tree, parents)
        _load_views(catalog, of.row_identity, files, tree)
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
    catalog: Catalog, row_identity: int, files: dict[int, SegmentFile], tree: PrefixTree
) -> None:
    """Give the nodes their rows on disk."""
    for id, file_id, row0 in catalog.rows(
        "SELECT node, file, row0 FROM views JOIN files ON files.id = file WHERE fingerprint = ?",
        (row_identity,),
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
