"""The store's lock: one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from towerd.errors import StoreLocked


class StoreLock:
    """An exclusive flock on `path`, which holds this process's id. The kernel drops it at exit."""

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises StoreLocked (naming the owner's pid) or OSError."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise StoreLocked(
                f"the store {path.parent} is in use by process {owner}; stop that daemon or "
                "choose another store directory"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock. The file stays: removing it would race with the next owner."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1
