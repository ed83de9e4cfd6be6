"""The mark of a clean stop: the checksum of the whole catalog file when it was closed.

If the mark matches, the file is bit for bit what was written, and a start has nothing to
check. A stale mark left by a crash does not match a catalog changed since, so the mark
needs no fsync.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import xxhash

_BLOCK_BYTES = 1 << 20


def was_closed_cleanly(path: Path) -> bool:
    """Whether the catalog is as the last clean stop left it. Removes the mark, because the
    catalog is about to change."""
    mark = _mark(path)
    try:
        expected = mark.read_bytes()
        mark.unlink()
        return not _has_wal(path) and _checksum(path) == expected
    except OSError:
        return False


def mark_clean(path: Path) -> None:
    """Record that the catalog was closed with all its changes."""
    with suppress(OSError):
        if _has_wal(path):
            return
        fd = os.open(
            _mark(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        with os.fdopen(fd, "wb") as file:
            file.write(_checksum(path))


def _mark(path: Path) -> Path:
    return path.with_name(path.name + ".clean")


def _has_wal(path: Path) -> bool:
    wal = path.with_name(path.name + "-wal")
    return wal.exists() and wal.stat().st_size > 0


def _checksum(path: Path) -> bytes:
    h = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            h.update(block)
    return h.digest()
