"""FileMap: a whole file as memory; and how files of a store are written and read, plainly or sealed."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from towerd.slots.errors import StateError
from towerd.store.files import durable
from towerd.store.files.buffers import BufferPool


class FileMap(mmap.mmap):
    """The bytes of a file. Views keep it."""

    proves_itself = False
    """Whether bytes that are there are what was written, so that no checksum need be looked at."""

    def need(self, at: int, n_bytes: int) -> None:
        """Have `n_bytes` from the offset `at` there before they are looked at. Raises StateError if they are damaged."""

    def view(self, at: int, n_bytes: int) -> memoryview:
        """Some bytes, which are there. Raises StateError if they are damaged, or beyond the end."""
        if at < 0 or n_bytes < 0 or at + n_bytes > len(self):
            raise StateError("the file ends before what its header lists")
        self.need(at, n_bytes)
        return memoryview(self)[at : at + n_bytes]

    def taken(self, at: int, n_bytes: int, pool: Executor | None = None) -> memoryview:
        """As `view`, for bytes that are soon read once and in order: they may be in memory of their own, which lasts as
        long as views of it. pool: threads that may help; None: none may"""
        return self.view(at, n_bytes)

    def give_back(self) -> None:
        """Have what was read not count as RAM any more: the next read finds it in the page cache. Raises OSError,
        ValueError if it was closed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.madvise(mmap.MADV_DONTNEED)

    def whole(self) -> memoryview:
        """All bytes. Raises StateError if any are damaged."""
        self.need(0, len(self))
        return memoryview(self)


class NewFile(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview, at: int) -> None:
        """Write at an offset; each byte once, in any order and thread. Raises OSError."""

    def read_back(self) -> FileMap:
        """What was written, after all of it was. Raises OSError."""


class StoreFiles(Protocol):
    """How files are written and read. The sizes are those of their content."""

    @property
    def buffers(self) -> BufferPool | None:
        """The memory that `FileMap.taken` takes; None: it takes none."""

    def create(
        self, half: Path, final: Path, n_bytes: int, *, is_durable: bool = True
    ) -> AbstractContextManager[NewFile]:
        """A new file of `n_bytes`; see `durable.new_file`."""

    def disk_size(self, n_bytes: int) -> int:
        """The size on disk of a file with so many bytes of content."""

    def map(self, path: Path, n_bytes: int) -> FileMap:
        """The whole file. OSError, or StateError unless it is a regular file of exactly `n_bytes` (bounds are
        checked against this, so nothing reads past the end)."""

    def read(self, path: Path, n_bytes_max: int | None = None) -> memoryview:
        """All bytes of a file, or the first `n_bytes_max` and one. Raises OSError, StateError."""


class PlainFiles:
    """Files that hold their content as it is."""

    buffers = None

    @contextmanager
    def create(
        self, half: Path, final: Path, n_bytes: int, *, is_durable: bool = True
    ) -> Iterator[NewFile]:
        with durable.new_file(half, final, is_durable=is_durable) as fd:
            durable.reserve(fd, n_bytes)
            yield _PlainFile(fd, n_bytes)

    def disk_size(self, n_bytes: int) -> int:
        return n_bytes

    def map(self, path: Path, n_bytes: int) -> FileMap:
        fd = open_checked(path, n_bytes)
        try:
            return FileMap(fd, n_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)

    def read(self, path: Path, n_bytes_max: int | None = None) -> memoryview:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            return memoryview(file.read(-1 if n_bytes_max is None else n_bytes_max + 1))


PLAIN_FILES: StoreFiles = PlainFiles()


class _PlainFile:
    """A file that is being written as it is."""

    def __init__(self, fd: int, n_bytes: int) -> None:
        self._fd, self._n_bytes = fd, n_bytes

    def write(self, data: memoryview, at: int) -> None:
        durable.write_all(self._fd, data, at)

    def read_back(self) -> FileMap:
        return FileMap(self._fd, self._n_bytes, prot=mmap.PROT_READ)


def open_checked(path: Path, n_bytes: int) -> int:
    """A descriptor of a regular file of exactly so many bytes on the disk. Raises OSError, StateError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise StateError("not a regular file")
        if info.st_size != n_bytes or n_bytes == 0:
            raise StateError(f"the file has {info.st_size} bytes, the catalog says {n_bytes}")
    except BaseException:
        os.close(fd)
        raise
    return fd
