"""Files without a name that this process has open."""

from __future__ import annotations

import os
from pathlib import Path

OPEN = Path("/proc/self/fd")
HAS_PROC = OPEN.is_dir()


def unnamed_files(folder: Path) -> list[int]:
    """Descriptors of the files that were made in `folder` and have no name any more, in the order
    of their opening."""
    found = []
    for link in OPEN.iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # that of the listing itself
            continue
        if Path(target).parent == folder.resolve() and target.endswith("(deleted)"):
            found.append(int(link.name))
    return sorted(found)
