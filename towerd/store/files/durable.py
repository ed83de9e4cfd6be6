"""File primitives that survive power loss, and their error translation."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from towerd.errors import DiskFull, StoreError

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
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
