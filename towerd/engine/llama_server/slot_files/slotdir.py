"""SlotDir: the directory for slot files: private, in RAM, with single-use random names.

Everything in it is conversation content, so no other user may read it (0700, 0600) and a file
exists only from its writing to its reading. Nothing needs fsync: durable data is in the store.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from towerd.errors import ConfigError, DiskFull

log = logging.getLogger(__name__)

PREFIX = "towerd-"
_LOCK = "lock"
"""Locked by the daemon that made the directory; if it is not locked, the files are abandoned."""
_SPARES_MAX = 2
_ROUND_BYTES = 1 << 20
_SHM = Path("/dev/shm")
_SHM_FREE_BYTES_MIN = 1 << 30
"""With less free than this (containers get 64 MB) slot states would not fit."""
_RAM_TYPES = ("tmpfs", "ramfs")


@dataclass(slots=True, eq=False)
class _Spare:
    """A file of ours with its pages allocated: writing into it again costs a memcpy, while a new
    one costs ten times that in page faults."""

    handle: int
    view: npt.NDArray[np.uint8]
    name: str

    def close(self) -> None:
        # The map goes with the last view of it.
        os.close(self.handle)


class SlotDir:
    """Slot files of one upstream. Methods block; call them on worker threads. Thread-safe.

    A file that we write may be longer than what was written: llama-server reads as much as the
    state says (the probe sees that it does)."""

    def __init__(self, path: Path, *, lock: int | None = None) -> None:
        """Use `private` or `shared`."""
        self.path = path
        self.in_ram = _is_ram(path)
        self._owner_lock = lock
        self._lock = threading.Lock()
        self._spares: list[_Spare] = []
        self._out: dict[str, _Spare] = {}

    @classmethod
    def private(cls, wanted: Path | None = None) -> SlotDir:
        """A fresh directory of our own, below `wanted`, else in RAM, else on disk (which is
        logged). Directories of killed daemons beside it are removed. Raises ConfigError."""
        parent = wanted or _ram_parent()
        if parent is None:
            parent = Path(tempfile.gettempdir())
            log.warning(
                "no RAM disk has room for slot states; they go through the disk",
                extra={"path": str(parent)},
            )
        try:
            _remove_abandoned(parent)
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mkdtemp makes it 0700
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise ConfigError(
                f"Cannot make a slot directory in {parent}: {error.strerror}; "
                "name another with --slot-dir."
            ) from error
        return cls(path, lock=lock)

    @classmethod
    def shared(cls, path: Path) -> SlotDir:
        """The directory that an attached llama-server was given with --slot-save-path.

        Raises ConfigError if it is missing, not writable, or open to other users."""
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigError(f"Cannot use the slot directory {path}: {error.strerror}.") from error
        if not stat.S_ISDIR(status.st_mode) or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"The slot directory {path} is not a directory we can write to.")
        if status.st_mode & 0o077:
            raise ConfigError(
                f"Other users may enter the slot directory {path}, through which conversations "
                f"pass: run `chmod 700 {path}`."
            )
        return cls(path.absolute())

    def new_name(self) -> str:
        """A file name that cannot be guessed, for one use."""
        return PREFIX + secrets.token_hex(16)

    def close(self) -> None:
        """Remove our files, and the directory if we made it."""
        with self._lock:
            spares, self._spares = [*self._spares, *self._out.values()], []
            self._out.clear()
        for spare in spares:
            spare.close()
        if self._owner_lock is None:
            self.sweep()
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._owner_lock)
        self._owner_lock = None

    def sweep(self) -> int:
        """Remove every file of ours, also those of an earlier daemon; returns how many."""
        found = list(self.path.glob(PREFIX + "*"))
        for path in found:
            with suppress(OSError):
                path.unlink()
        return len(found)

    def remove(self, name: str) -> None:
        """Remove a file if it is there; one that we wrote is kept for the next use, under a secret
        name."""
        with self._lock:
            spare = self._out.pop(name, None)
            if spare is not None and len(self._spares) < _SPARES_MAX:
                with suppress(OSError):
                    os.rename(self.path / name, self.path / spare.name)
                    self._spares.append(spare)
                    return
        if spare is not None:
            spare.close()
        with suppress(OSError):
            (self.path / name).unlink()

    @contextmanager
    def writing(self, name: str, size: int) -> Iterator[npt.NDArray[np.uint8]]:
        """uint8[size] over the start of a file that gets `name` when the block ends well.

        Raises DiskFull when it does not fit; the file is gone then."""
        spare = self._spare(size)
        try:
            yield spare.view[:size]
            os.rename(self.path / spare.name, self.path / name)
        except BaseException:
            self._discard(spare)
            raise
        with self._lock:
            self._out[name] = spare

    def take(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a file that the upstream saved, as a read-only map; the name is gone, the
        memory goes with the last view. Raises OSError if there is no regular file."""
        handle = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", name)
            if status.st_size == 0:
                return np.empty(0, np.uint8)
            view = mmap.mmap(handle, status.st_size, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
            self.remove(name)
        return np.frombuffer(view, np.uint8)

    def _spare(self, size: int) -> _Spare:
        """A file with room for `size` bytes, under a hidden name: one that is kept, or a new one.
        Kept ones that are too small make way for it."""
        with self._lock:
            fitting = [each for each in self._spares if len(each.view) >= size]
            if fitting:
                best = min(fitting, key=lambda each: len(each.view))
                self._spares.remove(best)
                return best
            small, self._spares = self._spares, []
        for each in small:
            self._discard(each)
        return self._new_file(size)

    def _new_file(self, size: int) -> _Spare:
        size = -(-size // _ROUND_BYTES) * _ROUND_BYTES
        if size > shutil.disk_usage(self.path).free:
            raise self._full(size)
        name = self.new_name()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self.path / name, flags, 0o600)
        try:
            _reserve(handle, size)
            view = np.frombuffer(mmap.mmap(handle, size), np.uint8)
        except OSError as error:
            os.close(handle)
            (self.path / name).unlink()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._full(size) from error
            raise
        return _Spare(handle, view, name)

    def _discard(self, spare: _Spare) -> None:
        spare.close()
        with suppress(OSError):
            (self.path / spare.name).unlink()

    def _full(self, size: int) -> DiskFull:
        return DiskFull(f"The slot directory {self.path} has no room for {size} bytes.")


def _remove_abandoned(parent: Path) -> None:
    """Remove directories of daemons that were killed: their lock is free."""
    for path in parent.glob(PREFIX + "*"):
        if path.is_symlink() or path.stat().st_uid != os.getuid():
            continue
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # its daemon lives
        finally:
            os.close(lock)


def _reserve(handle: int, size: int) -> None:
    """Allocate the pages now: a full tmpfs kills a process that writes to a map of a sparse
    file."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.ftruncate(handle, size)


def _ram_parent() -> Path | None:
    """A tmpfs with room that this user may write to."""
    for path in (_SHM, _runtime_dir()):
        if path is None or not os.access(path, os.W_OK | os.X_OK) or not _is_ram(path):
            continue
        if shutil.disk_usage(path).free >= _SHM_FREE_BYTES_MIN:
            return path
    return None


def _runtime_dir() -> Path | None:
    value = os.environ.get("XDG_RUNTIME_DIR")
    return Path(value) if value else None


def _is_ram(path: Path) -> bool:
    """Whether `path` lies on a RAM disk."""
    resolved = path.resolve()
    place, kind = "", ""
    for mount in psutil.disk_partitions(all=True):
        # Of those at one place the last one hides the others.
        if resolved.is_relative_to(mount.mountpoint) and len(mount.mountpoint) >= len(place):
            place, kind = mount.mountpoint, mount.fstype
    return kind in _RAM_TYPES
