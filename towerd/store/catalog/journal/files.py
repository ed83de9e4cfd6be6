"""The journal's folder: scanning, appending to and rewriting snapshots and logs.

`<seq>.snapshot` holds every row of the catalog after transaction `seq`. `<seq>.log` holds
the changes of the transactions after `seq`. The newest complete snapshot and the logs from
it on form a second copy of the catalog. A snapshot appears under its name only when it is
complete and durable; the files that it replaces are removed after that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec

from towerd.store.catalog.journal.chain import (
    LOG,
    SNAPSHOT,
    Chain,
    SnapshotEnd,
    name_of,
    read_chain,
    seq_of,
)
from towerd.store.catalog.journal.changes import TableChange, encode_changes
from towerd.store.catalog.journal.frames import FrameKind, encode_frame
from towerd.store.files import durable
from towerd.store.files.directory import remove_file

GROWN_BYTES_MIN = 1 << 20
"""A log below this size is never rewritten because of its size."""
UNFINISHED = ".unfinished"

SetAside: TypeAlias = Callable[[Path], bool]


class Journal:
    """The files of one store. Not thread-safe, except that `write_snapshot` may run beside
    every other method."""

    def __init__(self, folder: Path, schema: int) -> None:
        """Create `folder` if it is missing. Raises OSError."""
        self.folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in folder.glob("*" + UNFINISHED + "*"):
            remove_file(path)
        self._schema = schema
        self._store = 0
        self._fd = -1
        self._path = folder
        self._start = 0
        self._end = 0
        self._snapshot_bytes = 0
        self.is_behind = False
        """A record is missing or a rewrite failed, so the journal must be rewritten."""

    def read(self) -> Chain:
        """Read and check all files."""
        return read_chain(self.folder)

    def begin(self, chain: Chain, store: int, seq: int) -> None:
        """Append to the newest log of `chain` from now on, or to a new one that follows
        transaction `seq`. Cuts off a half-written record left by a crash. Raises OSError."""
        self._store = store
        logs = [file for file in chain.files if file.path.suffix == LOG]
        start = logs[-1].seq if logs else seq
        self._snapshot_bytes = sum(
            file.size for file in chain.files if file.path.suffix == SNAPSHOT
        )
        self._open(start, logs[-1].sound_size if logs else 0)

    def append(self, seq: int, changes: Iterable[TableChange]) -> None:
        """Write the changes of transaction `seq` without syncing. If it raises OSError,
        nothing was written: the disk is full."""
        frame = encode_frame(
            FrameKind.CHANGE, self._schema, self._store, seq, encode_changes(changes)
        )
        self._start = self._end
        try:
            at = 0
            while at < len(frame):
                at += os.write(self._fd, frame[at:])
        except OSError:
            self.take_back()
            raise
        self._end += len(frame)

    def take_back(self) -> None:
        """Remove the last record, because its transaction failed."""
        try:
            os.ftruncate(self._fd, self._start)
            self._end = self._start
        except OSError:
            self.is_behind = True

    def sync(self) -> None:
        """Make appended records durable. Raises OSError."""
        durable.sync(self._fd)

    def close(self) -> None:
        """Close the log."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def rotate(self, seq: int) -> None:
        """Begin a new log after transaction `seq`. If it raises OSError, the old one stays."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.is_lost or self._path != self.folder / name_of(seq, LOG):
            before = self._fd
            self._open(seq, 0)
            os.close(before)

    def write_snapshot(
        self, store: int, seq: int, rows: Iterable[TableChange], sequences: dict[str, int]
    ) -> None:
        """Write the catalog as it was after transaction `seq`, then remove older files.
        Raises OSError and whatever `rows` raises; the journal is then unchanged."""
        path = self.folder / name_of(seq, SNAPSHOT)
        unfinished = path.with_name(path.name + UNFINISHED)
        n_frames, size = 0, 0
        try:
            fd = os.open(
                unfinished,
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
            with os.fdopen(fd, "wb") as file:
                for change in rows:
                    payload = encode_changes([change])
                    file.write(encode_frame(FrameKind.ROWS, self._schema, store, seq, payload))
                    n_frames += 1
                end = msgspec.msgpack.encode(SnapshotEnd(n_frames, sequences))
                file.write(encode_frame(FrameKind.WHOLE, self._schema, store, seq, end))
                file.flush()
                durable.sync(file.fileno())
                size = file.tell()
            os.replace(unfinished, path)
        except BaseException:
            remove_file(unfinished)
            raise
        durable.sync_dir(self.folder)
        self._snapshot_bytes = size
        for old in self._older(seq):
            remove_file(old)

    @property
    def is_lost(self) -> bool:
        """Whether the current log was removed from outside."""
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except OSError:
            return True

    @property
    def has_history(self) -> bool:
        """Whether the files have more than the catalog's rows: changes since the last rewrite, or
        what a rewrite that failed or was killed has left."""
        return self._end > 0 or bool(self._older(seq_of(self._path) or 0))

    @property
    def is_grown(self) -> bool:
        """Whether the logs are larger than a rewritten journal would usually be."""
        return self._end > max(GROWN_BYTES_MIN, self._snapshot_bytes)

    def nbytes(self) -> int:
        """Bytes of all files."""
        n_bytes = 0
        for path in self._files():
            with suppress(FileNotFoundError):  # a rewritten journal has just replaced it
                n_bytes += path.stat().st_size
        return n_bytes

    def set_aside(self, set_aside: SetAside) -> int:
        """Pass every file to `set_aside`, which returns whether it succeeded; returns the
        number of successes."""
        return sum(set_aside(path) for path in list(self._files()))

    def _files(self) -> Iterator[Path]:
        with suppress(FileNotFoundError):
            yield from (path for path in self.folder.iterdir() if seq_of(path) is not None)

    def _older(self, seq: int) -> list[Path]:
        return [path for path in self._files() if (seq_of(path) or 0) < seq]

    def _open(self, seq: int, size: int) -> None:
        path = self.folder / name_of(seq, LOG)
        fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            raise
        self._fd, self._path = fd, path
        self._start = self._end = size
