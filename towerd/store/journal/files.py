"""The journal's folder: snapshots and logs, scanned as a whole, appended to, rewritten.

`<seq>.snapshot` holds every row of the catalog as it was after transaction `seq`. `<seq>.log` holds
what the transactions after `seq` changed. The newest whole snapshot and the logs from it on are the
catalog a second time. A snapshot appears under its name only when it is complete and durable, and
what it replaces is removed after that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec

from towerd.store import durable
from towerd.store.directory import remove_file
from towerd.store.journal.chain import (
    LOG,
    SNAPSHOT,
    Chain,
    Whole,
    name_of,
    read_chain,
    seq_of,
)
from towerd.store.journal.changes import TableChange, encode_changes
from towerd.store.journal.frames import Kind, encode_frame

GROWN_BYTES_MIN = 1 << 20
"""A log below this size is never rewritten for its size."""
UNFINISHED = ".unfinished"

SetAside: TypeAlias = Callable[[Path], bool]


class Journal:
    """The files of one store. Not thread-safe by itself, except that `write_snapshot` may run
    beside everything else."""

    def __init__(self, folder: Path, schema: int) -> None:
        """`folder` is made if it is missing. Raises OSError."""
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
        """A record is missing, or rewriting failed: it has to be rewritten."""

    def read(self) -> Chain:
        """All that the files hold, checked."""
        return read_chain(self.folder)

    def begin(self, chain: Chain, store: int, seq: int) -> None:
        """Append to the newest log of `chain` from now on, or to a new one that follows transaction
        `seq`. What a crash left half-written at its end is cut off. Raises OSError."""
        self._store = store
        logs = [file for file in chain.files if file.path.suffix == LOG]
        start = logs[-1].seq if logs else seq
        self._snapshot_bytes = sum(
            file.size for file in chain.files if file.path.suffix == SNAPSHOT
        )
        self._open(start, logs[-1].sound_size if logs else 0)

    def append(self, seq: int, changes: Iterable[TableChange]) -> None:
        """Write what transaction `seq` changed; not synced. Raises OSError, and then nothing was
        written."""
        frame = encode_frame(Kind.CHANGE, self._schema, self._store, seq, encode_changes(changes))
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
        """Remove the last record: its transaction did not come about."""
        try:
            os.ftruncate(self._fd, self._start)
            self._end = self._start
        except OSError:
            self.is_behind = True

    def sync(self) -> None:
        """Make what was appended durable. Raises OSError."""
        durable.sync(self._fd)

    def close(self) -> None:
        """Close the log."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def rotate(self, seq: int) -> None:
        """Begin a new log after transaction `seq`. Raises OSError, and then the old one stays."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.is_lost or self._path != self.folder / name_of(seq, LOG):
            before = self._fd
            self._open(seq, 0)
            os.close(before)

    def write_snapshot(
        self, store: int, seq: int, rows: Iterable[TableChange], sequences: dict[str, int]
    ) -> None:
        """Write the catalog as it was after transaction `seq`, then remove what is older. Raises
        OSError, and whatever `rows` raises; then everything is as before."""
        path = self.folder / name_of(seq, SNAPSHOT)
        unfinished = path.with_name(path.name + UNFINISHED)
        n_frames, size = 0, 0
        try:
            fd = os.open(
                unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )  # fmt: skip
            with os.fdopen(fd, "wb") as file:
                for change in rows:
                    payload = encode_changes([change])
                    file.write(encode_frame(Kind.ROWS, self._schema, store, seq, payload))
                    n_frames += 1
                end = msgspec.msgpack.encode(Whole(n_frames, sequences))
                file.write(encode_frame(Kind.WHOLE, self._schema, store, seq, end))
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
        """Whether someone removed the log that is being written."""
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except OSError:
            return True

    @property
    def has_log(self) -> bool:
        """Whether anything was appended since it was rewritten."""
        return self._end > 0

    @property
    def is_grown(self) -> bool:
        """Whether the logs are larger than what a rewritten journal would mostly be."""
        return self._end > max(GROWN_BYTES_MIN, self._snapshot_bytes)

    def nbytes(self) -> int:
        """Bytes of all files."""
        n_bytes = 0
        for path in self._files():
            with suppress(FileNotFoundError):  # a rewritten journal took its place just now
                n_bytes += path.stat().st_size
        return n_bytes

    def set_aside(self, set_aside: SetAside) -> int:
        """Hand every file to `set_aside`, which says whether it could; how many it could."""
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
