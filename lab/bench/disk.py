"""The bytes that stores take on disk."""

from __future__ import annotations

from pathlib import Path


def disk_bytes(root: Path) -> int:
    """Disk space allocated to a store: files, catalog, directories."""
    return sum(path.lstat().st_blocks * 512 for path in (root, *root.rglob("*")))
