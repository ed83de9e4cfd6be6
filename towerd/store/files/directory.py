"""The store's directory: its lock, file locations, creation, quarantine and removal."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Container
from pathlib import Path

from towerd.errors import StoreError, StoreLocked
from towerd.store.files import durable
from towerd.store.files.disk_limit import DiskLimit
from towerd.store.files.file_map import PLAIN_FILES, StoreFiles
from towerd.store.files.writes import DailyWrites

DAY_S = 86_400.0


class Directory:
    """`segments/` holds catalogued files, `tmp/` files being written, `quarantine/` damaged
    ones, `journal/` the second copy of the catalog, `boundaries/` state checkpoints. `tables/`, created on demand, holds
    tables for reading frozen sessions; `tokenizers/` vocabularies; `bases/` transform bases; `media/` pictures and sounds. Directories are 0700, files 0600."""

    def __init__(
        self,
        root: Path,
        clock: Callable[[], float] = time.time,
        files: StoreFiles = PLAIN_FILES,
    ) -> None:
        """Create what is missing and prove that it can be written. clock: tells the day that written
        bytes are counted for; files: how files are written and read.

        Raises StoreError, or DiskFull when not even that fits."""
        self.root = root
        self.files = files
        self.segments = root / "segments"
        self.tmp = root / "tmp"
        self.quarantine = root / "quarantine"
        self.checkpoints = root / "boundaries"
        self.journal = root / "journal"
        self.tables = root / "tables"
        self.tokenizers = root / "tokenizers"
        self.media = root / "media"
        self.bases = root / "bases"
        self.catalog = root / "catalog.sqlite"
        self.lock = root / "lock"
        with durable.store_errors(f"the store directory {root} cannot be used"):
            for path in (root, self.segments, self.tmp, self.quarantine, self.journal):
                path.mkdir(mode=0o700, parents=path == root, exist_ok=True)
                if path != root and path.is_symlink():
                    raise StoreError(f"{path} is a link; a store must be one directory")
            probe = self.tmp / f"probe-{os.getpid()}"
            fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            os.close(fd)
            probe.unlink(missing_ok=True)  # another process may sweep it up
        self.writes = DailyWrites(root, clock)
        self.limit = DiskLimit(self, time.monotonic)

    def sweep_tmp(self, writing: Callable[[], Container[str]] = frozenset) -> int:
        """Delete partial files left by a killed process; returns the bytes freed. writing: the
        names of those that are being written."""
        return sum(remove_file(path) for path in self._halves(writing))

    def names(self) -> set[str]:
        """The names in `segments/`."""
        with os.scandir(self.segments) as entries:
            return {entry.name for entry in entries}

    def remove(self, name: str) -> int:
        """Delete a segment file if it is there; returns the bytes freed."""
        return remove_file(self.segments / name)

    def set_aside(self, path: Path) -> bool:
        """Move a damaged file into `quarantine/`, stamped with the time; returns whether it
        succeeded."""
        target = self.quarantine / path.name
        try:
            os.rename(path, target)
            os.utime(target, follow_symlinks=False)
        except OSError:
            return False  # gone or unmovable: the catalog forgets it either way
        return True

    def empty_quarantine(self, days: float | None = None) -> int:
        """Delete what was set aside more than `days` ago, or all; returns the bytes freed."""
        return sum(remove_file(path) for path in self._set_aside_before(days))

    def size(self, name: str) -> int:
        """Bytes of a segment file; 0 if it is not there."""
        return file_size(self.segments / name)

    def leftovers(self, writing: Callable[[], Container[str]], days: float) -> int:
        """Bytes that `sweep_tmp` and `empty_quarantine` would free."""
        return sum(file_size(p) for p in (*self._halves(writing), *self._set_aside_before(days)))

    def _halves(self, writing: Callable[[], Container[str]]) -> list[Path]:
        found = list(self.tmp.iterdir())
        names = writing()  # after the list: a name is told before its file is made
        return [path for path in found if path.name not in names]

    def _set_aside_before(self, days: float | None) -> list[Path]:
        if days is None:
            return list(self.quarantine.iterdir())
        oldest = time.time() - days * DAY_S
        return [path for path in self.quarantine.iterdir() if path.lstat().st_mtime <= oldest]


def file_size(path: Path) -> int:
    """Bytes of a file; 0 if it is not there."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def remove_file(path: Path) -> int:
    """Delete a file if it can be; returns the bytes freed."""
    try:
        n_bytes = path.lstat().st_size
        path.unlink()
    except OSError:
        return 0
    return n_bytes


class StoreLock:
    """An exclusive flock on `path`, which holds this process's id. The kernel drops it at exit."""

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises StoreLocked (naming the owner's pid) or OSError."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._take(path)
        except BaseException:  # such as a full disk: it can be taken once there is room
            os.close(self._fd)
            raise

    def _take(self, path: Path) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise StoreLocked(
                f"the store {path.parent} is in use by process {owner}; stop that daemon or "
                "choose another store directory"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock. The file stays: removing it would race with the next owner."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.ftruncate(fd, 0)
            finally:
                os.close(fd)
