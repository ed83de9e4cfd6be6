"""State checkpoints beside the segments, in memory and in `boundaries/`.

A state checkpoint stands at the end of a node; a node is split if none ends there. A split
keeps the lower part's identity, so its checkpoint is unaffected. The catalog does not list
checkpoints: their files are named by the segment keys in the catalog.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from towerd.errors import RowsDamaged, StoreError
from towerd.slots.errors import StateError
from towerd.store.catalog.catalog import EnteredIdentity
from towerd.store.files import durable
from towerd.store.files.file_map import StoreFiles
from towerd.store.segments.checkpoint_file import (
    ANYWHERE,
    CUT_META,
    FOLDER,
    HALF,
    file_name,
    new_half,
    parse_name,
    read_checkpoint,
    row_identity_of,
    verify_checkpoint,
    write_checkpoint,
)
from towerd.store.segments.segment_header import segment_key
from towerd.store.state.state import StoreState, load_tree
from towerd.store.tree.node import Node
from towerd.tokens import Ids, ids_bytes, path_bytes

Bytes = npt.NDArray[np.uint8]
_UNCLAIMED = -1
"""Stands for the tokenizer of a row identity that the catalog does not have; it has no segments."""
_STATEFUL_OTHERS = (
    "SELECT f.digest FROM fingerprints f JOIN meta m ON m.key = ? || lower(hex(f.digest))"
    " WHERE f.tokenizer = ? AND f.digest != ? AND m.value != ?"
)


@dataclass(eq=False, slots=True)
class StateCheckpoint:
    """The state at the end of `node`: in memory (`data`), in a file, or both."""

    node: Node
    derived: bool
    """It was computed from approximate rows."""
    nbytes: int
    data: Bytes | None = None
    has_file: bool = False

    @property
    def position(self) -> int:
        """Number of tokens that the state has seen."""
        return self.node.p1


class CheckpointTable:
    """The state checkpoints of an open store. Thread-safe."""

    def __init__(self, state: StoreState) -> None:
        """Find the files that belong to this row identity's segments; nothing is opened.

        Raises StoreError when the directory cannot be used."""
        self.state = state
        self.folder = state.directory.checkpoints
        self.file_bytes = 0
        """All files of all row identities."""
        self._found: dict[int, StateCheckpoint] = {}
        self._foreign: dict[str, int] = {}
        """The size of each file that no segment of this row identity claims."""
        self._lock = threading.RLock()
        with durable.store_errors(f"the directory {self.folder} cannot be used"):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if self.folder.is_symlink():
                raise StoreError(f"{self.folder} is a link; a store must be one directory")
            self._load()

    def __len__(self) -> int:
        return len(self._found)

    def at(self, node: Node) -> StateCheckpoint | None:
        """The state at the end of a node."""
        return self._found.get(node.id)

    def all(self) -> list[StateCheckpoint]:
        """A snapshot, without states whose segment was removed."""
        with self._lock:
            return [found for found in self._found.values() if not found.node.removed]

    def attach(self, ids: Ids, scope: str, states: Mapping[int, tuple[Bytes, bool]]) -> list[Node]:
        """Keep states in memory: position -> (bytes, derived). Positions that no recorded
        path reaches are skipped; an existing exact state is kept. Returns the nodes that took
        a state and whose files must be written."""
        with self.state.locked():
            n_known = self.state.tree.match(ids_bytes(ids), scope).n
            ends = sorted(position for position in states if 0 < position <= n_known)
            if not ends:
                return []
            path = self.state.insert(path_bytes(ids, ends), scope, ends)
        nodes = {node.p1: node for node in path}
        taken = []
        with self._lock:
            for position in ends:
                node, (data, derived) = nodes[position], states[position]
                known = self._found.get(node.id)
                if known is not None and (derived or not known.derived):
                    continue
                if known is not None:
                    self.drop(node)
                self._found[node.id] = StateCheckpoint(node, derived, len(data), data)
                taken.append(node)
        return taken

    def write(self, node: Node) -> int:
        """Write a node's state from memory to its file and release the memory. Returns the
        bytes written, 0 if there is nothing to write. Raises DiskFull or StoreError; the
        state then stays in memory."""
        found = self.at(node)
        if found is None or found.data is None or found.has_file:
            return 0
        state, key, half = self.state, self._key(node), new_half()
        failures = durable.store_errors("a state checkpoint cannot be written")
        with state.catalog.being_written(half), failures:
            size = write_checkpoint(
                state.directory.files,
                self.folder,
                half,
                state.digest,
                key,
                node.p1,
                found.derived,
                found.data,
            )
        state.directory.writes.add("checkpoints", size)
        with self.state.locked():  # a gc either sees the file, or has removed the node
            is_removed = node.removed
        with self._lock:
            if is_removed or self._found.get(node.id) is not found:  # dropped meanwhile
                self._unlink(file_name(key, found.derived))
                return 0
            found.has_file, found.data, found.nbytes = True, None, size
            self.file_bytes += size - self._foreign.pop(file_name(key, found.derived), 0)
        return size

    def load(self, found: StateCheckpoint) -> Bytes:
        """The state's bytes. Raises RowsDamaged (the file is now quarantined) or StoreError."""
        data = found.data
        if data is not None:
            return data
        key, node = self._key(found.node), found.node
        name = file_name(key, found.derived)
        try:
            digest, derived = self.state.digest, found.derived
            return read_checkpoint(
                self.state.directory.files, self.folder / name, digest, key, node.p1, derived
            )
        except FileNotFoundError as error:
            self._forget(found)
            raise RowsDamaged(f"the state checkpoint {name} is gone") from error
        except StateError as error:
            self.state.directory.set_aside(self.folder / name)
            self._forget(found)
            raise RowsDamaged(f"{name} is damaged and set aside: {error}") from error
        except OSError as error:
            raise StoreError(f"{name} cannot be read: {error.strerror}") from error

    def drop(self, node: Node) -> int:
        """Delete a node's state; returns the bytes that its file had."""
        with self._lock:
            found = self._found.pop(node.id, None)
            if found is None or not found.has_file:
                return 0
            self.file_bytes -= found.nbytes
            self._unlink(file_name(self._key(node), found.derived))
            return found.nbytes

    def drop_since(self, since: float) -> None:
        """Delete the states of this row identity that were taken after a Unix time."""
        with self._lock:
            for found in self.all():
                path = self.folder / file_name(self._key(found.node), found.derived)
                if not path.is_file() or path.stat().st_mtime >= since:
                    self.drop(found.node)

    def drop_foreign(self, bytes_needed: int) -> int:
        """Delete files of row identities that nobody has open and of removed segments, as many as
        needed."""
        self.sweep()
        freed, live = 0, self._open_elsewhere()
        with self._lock:
            for name in list(self._foreign):
                if freed >= bytes_needed:
                    break
                if live and digest_in(self.state.directory.files, self.folder / name) in live:
                    continue
                freed += self._foreign.pop(name)
                self._unlink(name)
            self.file_bytes -= freed
        return freed

    def sweep(self) -> None:
        """Forget states whose segment was collected; their files may already be deleted."""
        with self._lock:
            for id, found in list(self._found.items()):
                if not found.node.removed:
                    continue
                del self._found[id]
                if found.has_file:
                    name = file_name(self._key(found.node), found.derived)
                    if (self.folder / name).exists():
                        self._foreign[name] = found.nbytes
                    else:
                        self.file_bytes -= found.nbytes

    def _load(self) -> None:
        state = self.state
        files = list(checkpoint_files(state.directory.root))
        writing = state.catalog.writing()  # after the list: a name is told before its file is made
        nodes = {key: node for node, key in state.tree.keys(state.digest)} if files else {}
        for path, size in files:
            named = parse_name(path.name)
            if named is None:
                if path.suffix == HALF and path.name not in writing:
                    path.unlink(missing_ok=True)
                continue
            self.file_bytes += size
            node = nodes.get(named[0])
            if node is None:
                self._foreign[path.name] = size
            elif node.id not in self._found or not named[1]:
                self._found[node.id] = StateCheckpoint(node, named[1], size, has_file=True)

    def _open_elsewhere(self) -> set[bytes]:
        """The digests of the row identities that other processes have open."""
        with self.state.locked():
            catalog = self.state.catalog
            live = catalog.open_elsewhere()
            rows = catalog.rows("SELECT id, digest FROM fingerprints") if live else []
        return {digest for id, digest in rows if id in live}

    def _key(self, node: Node) -> bytes:
        with self.state.locked():  # a split would show half of a path
            prefix = node.prefix_bytes()
        return segment_key(self.state.digest, node.scope, prefix)

    def _forget(self, found: StateCheckpoint) -> None:
        with self._lock:
            if self._found.get(found.node.id) is found:
                del self._found[found.node.id]
                self.file_bytes -= found.nbytes if found.has_file else 0

    def _unlink(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)


def cut_of(state: StoreState) -> str:
    """Where the stored state of the open row identity can be cut: `anywhere`, at a `boundary`, or
    only as a `whole`."""
    with state.locked():
        return state.catalog.get_meta(CUT_META + state.digest.hex()) or ANYWHERE


def checkpoint_bytes(state: StoreState, node: Node) -> int:
    """Size of the file with the state at the end of a node; 0 if there is none."""
    folder = state.directory.checkpoints
    if not folder.is_dir():
        return 0
    with state.locked():
        prefix = node.prefix_bytes()
    key = segment_key(state.digest, node.scope, prefix)
    for derived in (False, True):
        path = folder / file_name(key, derived)
        if path.is_file():
            return path.stat().st_size
    return 0


def digest_in(files: StoreFiles, path: Path) -> bytes | None:
    """The digest of the row identity that a file is of; None if it cannot be read."""
    try:
        return row_identity_of(files, path)
    except OSError:
        return None


def checkpoint_files(root: Path) -> Iterator[tuple[Path, int]]:
    """every file of the store's folder of state checkpoints with its size, by name; links are left out."""
    folder = root / FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file() and not path.is_symlink():
            yield path, path.stat().st_size


def is_checkpointed_elsewhere(state: StoreState, node: Node) -> bool:
    """Whether another model of this tokenizer has a state checkpoint at the end of a segment. Runs under
    the lock."""
    which = CUT_META, state.identity.tokenizer, state.digest, ANYWHERE
    others = state.catalog.rows(_STATEFUL_OTHERS, which)
    prefix = node.prefix_bytes() if others else b""
    keys = (segment_key(digest, node.scope, prefix) for (digest,) in others)
    folder = state.directory.checkpoints
    return any((folder / file_name(key, how)).exists() for key in keys for how in (False, True))


def stray_checkpoints(state: StoreState, removed: Collection[int] = ()) -> list[Path]:
    """Files that no segment of their model claims, and partial files left by a crash, which are
    not among those that are being written. `removed`: ids of segments about to be removed. Runs
    under the lock."""
    gone = set(removed)
    row_identities = state.catalog.rows("SELECT digest, tokenizer FROM fingerprints")
    tokenizers: dict[bytes, int | None] = dict(row_identities)
    trees = {state.identity.tokenizer: state.tree}
    keys: dict[bytes, set[bytes]] = {}
    strays = []
    files = list(checkpoint_files(state.directory.root))
    writing = state.catalog.writing()  # after the list: a name is told before its file is made
    for path, _ in files:
        named = parse_name(path.name)
        if named is None:
            if path.suffix == HALF and path.name not in writing:
                strays.append(path)
            continue
        try:
            of = row_identity_of(state.directory.files, path)
        except OSError:
            continue  # deleted meanwhile, or for verify to report
        tokenizer = tokenizers.get(of, _UNCLAIMED) if of is not None else None
        if of is None or tokenizer is None:  # it cannot be known whose it is
            continue
        if of not in keys:
            if tokenizer not in trees:
                trees[tokenizer] = load_tree(state.catalog, EnteredIdentity(0, tokenizer, b""), {})
            found = trees[tokenizer].keys(of)
            keys[of] = {key for node, key in found if node.id not in gone}
        if named[0] not in keys[of]:
            strays.append(path)
    return strays


def checkpoint_problem(files: StoreFiles, path: Path) -> str | None:
    """Read a file byte for byte and describe the problem; None if it is sound or was deleted
    meanwhile."""
    try:
        verify_checkpoint(files, path)
    except FileNotFoundError:
        return None
    except (StateError, OSError) as error:
        return str(error)
    return None
