"""Checks of all state checkpoint files: damaged ones and unclaimed ones."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path

from towerd.slots.errors import StateError
from towerd.store.catalog.catalog import Catalog
from towerd.store.segments.checkpoint_file import FOLDER, HALF, parse_name, verify_checkpoint
from towerd.store.state import StoreState

_HALF_WRITTEN_S = 3600.0
"""A file that is still being written is younger than this."""


def checkpoint_files(root: Path) -> Iterator[tuple[Path, int]]:
    """every file of the store's folder of state checkpoints with its size, by name; links are left out."""
    folder = root / FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file() and not path.is_symlink():
            yield path, path.stat().st_size


def stray_checkpoints(state: StoreState, removed: Collection[int] = ()) -> list[Path]:
    """Files that no segment of any model claims, and partial files left by a crash.
    `removed`: ids of segments about to be removed. Runs under the lock."""
    gone = set(removed)
    keys = segment_keys(state.catalog, gone)
    oldest = time.time() - _HALF_WRITTEN_S
    strays = []
    for path, _ in checkpoint_files(state.directory.root):
        named = parse_name(path.name)
        if named is None and path.suffix == HALF:
            is_stray = path.stat().st_mtime < oldest
        else:
            is_stray = named is not None and named[0] not in keys
        if is_stray:
            strays.append(path)
    return strays


def segment_keys(catalog: Catalog, without: Collection[int]) -> set[bytes]:
    """The keys of all segments of all models but those with these ids."""
    rows = catalog.rows("SELECT id, key FROM segments")
    return {bytes(key) for id, key in rows if id not in without}


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
