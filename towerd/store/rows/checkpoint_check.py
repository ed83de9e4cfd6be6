"""Checks of all state checkpoint files: damaged ones and unclaimed ones."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from pathlib import Path

from towerd.slots.errors import StateError
from towerd.store.catalog.catalog import EnteredIdentity
from towerd.store.segments.checkpoint_file import (
    ANYWHERE,
    CUT_META,
    FOLDER,
    HALF,
    file_name,
    fingerprint_of,
    parse_name,
    verify_checkpoint,
)
from towerd.store.segments.keys import segment_key
from towerd.store.state.loader import load_tree
from towerd.store.state.state import StoreState
from towerd.store.tree.node import Node

_UNCLAIMED = -1
"""Stands for the tokenizer of a fingerprint that the catalog does not have; it has no segments."""


def digest_in(path: Path) -> bytes | None:
    """The digest of the fingerprint that a file is of; None if it cannot be read."""
    try:
        return fingerprint_of(path)
    except OSError:
        return None


def checkpoint_files(root: Path) -> Iterator[tuple[Path, int]]:
    """every file of the store's folder of state checkpoints with its size, by name; links are left out."""
    folder = root / FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file() and not path.is_symlink():
            yield path, path.stat().st_size


_STATEFUL_OTHERS = (
    "SELECT f.digest FROM fingerprints f JOIN meta m ON m.key = ?1 || lower(hex(f.digest))"
    " WHERE f.tokenizer = ?2 AND f.digest != ?3 AND m.value != ?4"
)


def is_checkpointed_elsewhere(state: StoreState, node: Node) -> bool:
    """Whether another model of this tokenizer has a state checkpoint at the end of a segment. Runs under
    the lock."""
    which = CUT_META, state.identity.tokenizer, state.digest, ANYWHERE
    others = state.catalog.rows(_STATEFUL_OTHERS, which)
    prefix = node.prefix_bytes() if others else b""
    keys = (segment_key(digest, node.scope, prefix) for (digest,) in others)
    folder = state.directory.root / FOLDER
    return any((folder / file_name(key, how)).exists() for key in keys for how in (False, True))


def stray_checkpoints(
    state: StoreState, writing: Container[str], removed: Collection[int] = ()
) -> list[Path]:
    """Files that no segment of their model claims, and partial files left by a crash, which are
    not among those that are being written. `removed`: ids of segments about to be removed. Runs
    under the lock."""
    gone = set(removed)
    fingerprints = state.catalog.rows("SELECT digest, tokenizer FROM fingerprints")
    tokenizers: dict[bytes, int | None] = dict(fingerprints)
    trees = {state.identity.tokenizer: state.tree}
    keys: dict[bytes, set[bytes]] = {}
    strays = []
    for path, _ in checkpoint_files(state.directory.root):
        named = parse_name(path.name)
        if named is None:
            if path.suffix == HALF and path.name not in writing:
                strays.append(path)
            continue
        try:
            of = fingerprint_of(path)
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


def checkpoint_problem(path: Path) -> str | None:
    """Read a file byte for byte and describe the problem; None if it is sound or was deleted
    meanwhile."""
    try:
        verify_checkpoint(path)
    except FileNotFoundError:
        return None
    except (StateError, OSError) as error:
        return str(error)
    return None
