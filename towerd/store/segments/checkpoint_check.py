"""Checks of all state checkpoint files: damaged ones and unclaimed ones."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path

from towerd.slots.errors import StateError
from towerd.store.prefix.keys import segment_key
from towerd.store.prefix.node import Node
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
from towerd.store.state import StoreState

_HALF_WRITTEN_S = 3600.0
"""A file that is still being written is younger than this."""


def is_left_over(path: Path) -> bool:
    """Whether this is a half-written file of a killed process, not one that is being written."""
    try:
        return path.suffix == HALF and path.stat().st_mtime < time.time() - _HALF_WRITTEN_S
    except OSError:
        return False


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


def stray_checkpoints(state: StoreState, removed: Collection[int] = ()) -> list[Path]:
    """Files that no segment of their model claims, and partial files left by a crash. Those of
    models with another tokenizer than the open one count as claimed.
    `removed`: ids of segments about to be removed. Runs under the lock."""
    gone = set(removed)
    tokenizers = dict(state.catalog.rows("SELECT digest, tokenizer FROM fingerprints"))
    keys: dict[bytes, set[bytes]] = {}
    strays = []
    for path, _ in checkpoint_files(state.directory.root):
        named = parse_name(path.name)
        if named is None:
            if is_left_over(path):
                strays.append(path)
            continue
        try:
            of = fingerprint_of(path)
        except OSError:
            continue  # deleted meanwhile, or for verify to report
        if of is None or tokenizers.get(of, state.identity.tokenizer) != state.identity.tokenizer:
            continue
        if of not in keys:
            is_known = of in tokenizers
            found = state.trie.keys(of) if is_known else ()
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
