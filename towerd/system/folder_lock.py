"""The lock of a folder in which several processes write."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_locked(folder: Path) -> Iterator[None]:
    """Wait for the lock of a folder and hold it: one thread of one process at a time has it. The
    folder must exist. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
