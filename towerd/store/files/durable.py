"""File primitives that survive power loss, and their error translation."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from towerd.errors import DiskFull, StoreError

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ZEROS_BYTES = 1 << 20
_FULL_FSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)


def sync(fd: int) -> None:
    """Flush a file or directory to the medium (on macOS through the drive's own cache)."""
    if _FULL_FSYNC is not None:
        fcntl.fcntl(fd, _FULL_FSYNC)
    else:
        os.fsync(fd)


def sync_dir(path: Path) -> None:
    """Make renames and removals in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)


def make_dir(path: Path) -> None:
    """Make a directory durably, if it is not there. Of an empty one another thread may not have made the name durable yet.
    Raises OSError."""
    path.mkdir(mode=0o700, exist_ok=True)
    if next(path.iterdir(), None) is None:
        sync_dir(path.parent)


def reserve(fd: int, n_bytes: int) -> None:
    """Allocate the file's size now, so that a full disk is noticed before anything is written."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, n_bytes)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    os.ftruncate(fd, n_bytes)


@contextmanager
def new_file(half: Path, final: Path, *, is_durable: bool = True) -> Iterator[int]:
    """A descriptor of the new file `half`, which is durable under its name `final` when the block
    ends without an error; otherwise nothing is left behind. Raises OSError.

    is_durable: False leaves that to `make_durable`; until then a power cut may take its content, or it"""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(half, flags, 0o600)
    try:
        try:
            yield fd
            if is_durable:
                sync(fd)
        finally:
            os.close(fd)
        os.rename(half, final)
    except BaseException:
        half.unlink(missing_ok=True)
        raise
    if is_durable:
        sync_dir(final.parent)


def make_durable(path: Path) -> None:
    """Make a file durable under its name, unless it was removed. Raises OSError."""
    with suppress(FileNotFoundError):
        sync_file(path)
        sync_dir(path.parent)


def sync_file(path: Path) -> None:
    """Make what a file holds durable, but not its name. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview, at: int) -> None:
    """Write all of the data at an offset. Raises OSError."""
    while data:
        n = os.pwrite(fd, data, at)
        data, at = data[n:], at + n


def overwrite(fd: int) -> None:
    """Write zeros over a file, as far as the medium writes in place. Raises OSError."""
    left, at = os.fstat(fd).st_size, 0
    while left > 0:
        n = min(left, _ZEROS_BYTES)
        write_all(fd, memoryview(bytes(n)), at)
        left, at = left - n, at + n
    sync(fd)


def erase(path: Path) -> None:
    """Overwrite a file unless it has another name, and remove it; nothing if it is not there. Raises OSError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if os.fstat(fd).st_nlink == 1:
            overwrite(fd)
    finally:
        os.close(fd)
    path.unlink()


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turn an OSError of the block into DiskFull or StoreError, with a message that begins
    with `what`."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise DiskFull(
                f"{what}: {error.strerror}; free disk space or lower --warm-bytes"
            ) from error
        raise StoreError(f"{what}: {error.strerror or error}") from error
