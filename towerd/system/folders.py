"""Folders that processes share, and folders that they keep to themselves."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET_BYTES_MAX = 100
"""The longest path of a Unix socket: macOS allows 103 bytes, Linux 107."""
NAME_BYTES_MAX = 12
"""Of a socket in a folder of `socket_folder`, with the separator before it."""


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


def socket_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder for Unix sockets that only this user can enter; in /tmp if the path of a socket
    would be too long in the default place."""
    folder = tempfile.TemporaryDirectory(prefix=prefix)
    if len(os.fsencode(folder.name)) + NAME_BYTES_MAX <= SOCKET_BYTES_MAX:
        return folder
    folder.cleanup()
    return tempfile.TemporaryDirectory(prefix=prefix, dir="/tmp")
