"""A disk that knows what a power cut would leave: the edge under the store's files."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

SECTOR_BYTES = 512
"""A write that the power cut meets is torn at a multiple of this."""
_NOT_KEPT = "-shm"
"""SQLite makes this file anew at each start; it needs to survive nothing."""


class PowerLost(BaseException):
    """The power went, and every later use of the disk raises it again."""


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes at an offset, or a new size if `data` is None."""

    at: int
    data: bytes | None

    def apply(self, content: bytearray) -> None:
        """Change the content of a file."""
        end = self.at if self.data is None else self.at + len(self.data)
        content.extend(bytes(max(0, end - len(content))))
        if self.data is None:
            del content[self.at :]
        else:
            content[self.at : end] = self.data


@dataclass(slots=True)
class DiskFile:
    """The content of a file at its last sync, and what was written since."""

    synced: bytearray = field(default_factory=bytearray)
    unsynced: list[Write] = field(default_factory=list)

    def sync(self) -> None:
        """Make every write durable."""
        for write in self.unsynced:
            write.apply(self.synced)
        self.unsynced.clear()

    def after_cut(self, rng: random.Random) -> bytes:
        """The content that a power cut leaves: of what was not synced nothing, all, or any part."""
        content, luck = bytearray(self.synced), rng.choice((0.0, 0.5, 1.0))
        for write in self.unsynced:
            if rng.random() >= luck:
                continue
            if write.data is not None and luck < 1 and rng.random() < 0.3:
                n = rng.randrange(len(write.data) + 1) // SECTOR_BYTES * SECTOR_BYTES
                write = Write(write.at, write.data[:n])
            write.apply(content)
        return bytes(content)


@dataclass(slots=True)
class NameChange:
    """A name that appeared, went or moved. file: None for a folder; new or old: None for neither."""

    old: Path | None
    new: Path | None
    file: DiskFile | None
    is_synced: bool = False

    def touches(self, folder: Path) -> bool:
        """Whether a sync of the folder makes it durable."""
        return folder in {path.parent for path in (self.old, self.new) if path is not None}

    def apply(self, names: dict[Path, DiskFile | None]) -> None:
        """Change the names of the disk; without its folder a name stays away."""
        if self.old is not None:
            names.pop(self.old, None)
        if self.new is not None:
            names[self.new] = self.file


class SimulatedDisk:
    """The folder `root`, whose files are real, and beside it what of them is durable. The power goes
    before the `cut_at`-th change; `is_full` refuses whatever needs room."""

    def __init__(self, root: Path, cut_at: int | None) -> None:
        self.root, self.cut_at = root, cut_at
        self.n_changes = 0
        self.is_off = self.is_full = False
        self.trace: list[str] = []
        self._names: dict[Path, DiskFile | None] = {}
        for path in sorted(root.rglob("*")):
            is_file = path.is_file()
            self._names[path] = DiskFile(bytearray(path.read_bytes())) if is_file else None
        self._durable = dict(self._names)
        self._changes: list[NameChange] = []
        self._open: dict[int, Path | DiskFile] = {}
        self._unowned: set[int] = set()
        """Descriptors that no file object closes."""

    def has(self, path: Any) -> bool:
        """Whether a path is on this disk, and has to survive."""
        return not str(path).endswith(_NOT_KEPT) and self.root in Path(path).parents

    def begin(self) -> None:
        """A file or name on this disk is asked for: here other threads may come first."""

    def change(self, what: str, path: Any, *, needs_room: bool = False) -> None:
        """Count a change that is about to happen. Raises PowerLost, or OSError of a full disk."""
        if self.is_off or self.n_changes + 1 == self.cut_at:
            self.is_off = True
            raise PowerLost
        self.n_changes += 1
        self.trace.append(f"{self.n_changes} {what} {Path(path).name}")
        if needs_room and self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def made(self, path: Path, *, is_folder: bool = False) -> None:
        """There is a new, empty file or folder."""
        file = None if is_folder else DiskFile()
        self._rename(NameChange(None, path, file))

    def moved(self, old: Path, new: Path) -> None:
        """A file or folder has another name, or another one too if `old` stays."""
        self._rename(NameChange(None if old.exists() else old, new, self._names[old]))

    def removed(self, path: Path) -> None:
        """A name is gone."""
        self._rename(NameChange(path, None, None))

    def _rename(self, change: NameChange) -> None:
        change.apply(self._names)
        self._changes.append(change)

    def file(self, path: Path) -> DiskFile | None:
        """The file of this name."""
        return self._names.get(path)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        for change in self._changes:
            change.is_synced |= change.touches(folder)

    def after_cut(self, target: Path, rng: random.Random) -> None:
        """Write what a power cut leaves to the new folder `target`: names that were not synced stay
        up to some moment, in the order in which they were changed."""
        waiting = [change for change in self._changes if not change.is_synced]
        kept = waiting[: rng.choice((0, rng.randint(0, len(waiting)), len(waiting)))]
        names = dict(self._durable)
        for change in self._changes:
            if change.is_synced or any(change is each for each in kept):
                change.apply(names)
        target.mkdir()
        written: dict[int, Path] = {}
        for path in sorted(names, key=lambda path: (len(path.parts), path)):
            file, copy = names[path], target / path.relative_to(self.root)
            if not copy.parent.is_dir():
                continue
            if file is None:
                copy.mkdir()
            elif id(file) in written:
                os.link(written[id(file)], copy)
            else:
                copy.write_bytes(file.after_cut(rng))
                written[id(file)] = copy

    # --- the calls of the system ----------------------------------------------------------

    def descriptor(self, path: Any, flags: int, mode: int, dir_fd: int | None) -> int:
        """As `os.open`."""
        path = Path(path)
        if self.has(path):
            self.begin()
        is_new = self.has(path) and flags & os.O_CREAT and not path.exists()
        if is_new:
            self.change("create", path, needs_room=True)
        fd = _REAL["open"](path, flags, mode, dir_fd=dir_fd)
        self._open.pop(fd, None)
        self._unowned.add(fd)
        if is_new:
            self.made(path)
        if path.is_dir():
            self._open[fd] = path
        elif self.has(path) and (file := self._names.get(path)) is not None:
            self._open[fd] = file
            if flags & os.O_TRUNC and not is_new:
                self.change("truncate", path)
                file.unsynced.append(Write(0, None))
        return int(fd)

    def closed(self, fd: int) -> None:
        """As `os.close`."""
        self._unowned.discard(fd)
        _REAL["close"](fd)

    def file_of(self, fd: int, mode: str = "r", *rest: Any, **more: Any) -> Any:
        """As `os.fdopen`."""
        self._unowned.discard(fd)
        if mode == "wb":
            return io.BufferedWriter(_File(fd, "wb"))
        return _REAL["fdopen"](fd, mode, *rest, **more)

    def close_left(self) -> None:
        """Of a process that is gone there are no descriptors left."""
        while self._unowned:
            _REAL["close"](self._unowned.pop())

    def written(self, fd: int, data: Any, at: int | None) -> int:
        """As `os.write`, or `os.pwrite` at an offset."""
        file, data = self._open.get(fd), bytes(data)
        if isinstance(file, DiskFile):
            self.begin()
            self.change("write", f"{len(data)} bytes", needs_room=True)
            if at is None:
                is_end = _fcntl_append(fd)
                at = os.fstat(fd).st_size if is_end else os.lseek(fd, 0, os.SEEK_CUR)
                n = _REAL["write"](fd, data)
            else:
                n = _REAL["pwrite"](fd, data, at)
            file.unsynced.append(Write(at, data[:n]))
            return int(n)
        return int(_REAL["write"](fd, data) if at is None else _REAL["pwrite"](fd, data, at))

    def resized(self, fd: int, n_bytes: int, *, grows: bool = False) -> None:
        """As `os.ftruncate`; `grows`: as `os.posix_fallocate`, which never shortens."""
        file = self._open.get(fd)
        if isinstance(file, DiskFile):
            self.begin()
            self.change("resize to", str(n_bytes), needs_room=grows)
            if not grows or n_bytes > os.fstat(fd).st_size:
                file.unsynced.append(Write(n_bytes, None))
        _REAL["ftruncate"](fd, max(n_bytes, os.fstat(fd).st_size) if grows else n_bytes)

    def synced(self, fd: int) -> None:
        """As `os.fsync`."""
        what = self._open.get(fd)
        if isinstance(what, DiskFile):
            self.begin()
            self.change("sync", "file")
            what.sync()
        elif what is not None and (what == self.root or self.has(what)):
            self.begin()
            self.change("sync folder", what)
            self.sync_folder(what)

    def renamed(self, old: Any, new: Any, how: str) -> None:
        """As `os.rename`, `os.replace` or `os.link`."""
        old, new = Path(old), Path(new)
        if not self.has(new):
            _REAL[how](old, new)
            return
        self.begin()
        self.change(how, new)
        _REAL[how](old, new)
        self.moved(old, new)

    def unlinked(self, path: Any) -> None:
        """As `os.unlink`."""
        path = Path(path)
        if self.has(path):
            self.begin()
        is_there = self.has(path) and os.path.lexists(path)
        if is_there:
            self.change("remove", path)
        _REAL["unlink"](path)
        if is_there:
            self.removed(path)

    def folder_made(self, path: Any, mode: int) -> None:
        """As `os.mkdir`."""
        path = Path(path)
        if self.has(path):
            self.begin()
        is_new = self.has(path) and not path.exists()
        if is_new:
            self.change("mkdir", path, needs_room=True)
        _REAL["mkdir"](path, mode)
        if is_new:
            self.made(path, is_folder=True)


_REAL: dict[str, Callable[..., Any]] = {
    name: getattr(os, name)
    for name in "open write pwrite ftruncate fsync rename replace link unlink mkdir fdopen close".split()
}


def _fcntl_append(fd: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND)


class _File(io.FileIO):
    """What `os.fdopen` has under its buffer: it writes through the disk."""

    def write(self, data: Any, /) -> int:
        return os.write(self.fileno(), data)


@contextmanager
def calls_to(disk: SimulatedDisk) -> Iterator[None]:
    """What Python asks of the system goes to the disk instead, inside the block."""
    made: dict[str, Any] = {
        "open": lambda path, flags, mode=0o777, *, dir_fd=None: disk.descriptor(
            path, flags, mode, dir_fd
        ),
        "write": lambda fd, data: disk.written(fd, data, None),
        "pwrite": disk.written,
        "ftruncate": disk.resized,
        "posix_fallocate": lambda fd, at, n: disk.resized(fd, at + n, grows=True),
        "fsync": disk.synced,
        "rename": lambda old, new: disk.renamed(old, new, "rename"),
        "replace": lambda old, new: disk.renamed(old, new, "replace"),
        "link": lambda old, new, **_: disk.renamed(old, new, "link"),
        "unlink": lambda path, *, dir_fd=None: disk.unlinked(path),
        "mkdir": lambda path, mode=0o777, *, dir_fd=None: disk.folder_made(path, mode),
        "fdopen": disk.file_of,
        "close": disk.closed,
    }
    try:
        with patch.multiple(os, **made):
            yield
    finally:
        disk.close_left()


def flip_bit(path: Path, rng: random.Random) -> bool:
    """Change one bit of a file; returns whether it was a bit of something, not of the zeros between."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    is_something = any(data[max(0, at - 16) : at + 16])
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return is_something


def discard(folder: Path) -> None:
    """Remove what was simulated."""
    shutil.rmtree(folder, ignore_errors=True)
