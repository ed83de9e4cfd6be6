"""The combined content of the journal files: first state, last state, and gaps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from towerd.store.catalog.journal.changes import TableChange, decode_changes
from towerd.store.catalog.journal.frames import FrameKind, JournalFrame, frames

SNAPSHOT = ".snapshot"
LOG = ".log"
_ATTEMPTS = 3
_NAME = re.compile(r"([0-9]{16})(\.snapshot|\.log)")


class SnapshotEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end record of a snapshot."""

    n_frames: int
    sequences: dict[str, int]
    """The highest key ever used, for each table that never reuses keys."""


@dataclass(frozen=True, slots=True)
class JournalFile:
    """One file and its sound frames."""

    path: Path
    seq: int
    size: int
    frames: Sequence[JournalFrame]
    whole: SnapshotEnd | None
    """The end record of a complete snapshot."""

    @property
    def sound_size(self) -> int:
        """The offset at which the last sound frame ends."""
        return self.frames[-1].end if self.frames else 0

    @property
    def is_damaged(self) -> bool:
        """Whether bytes before the last sound frame are corrupt, or a snapshot is incomplete.
        A log that ends in half a frame was cut off by a crash and is not damaged."""
        if self.path.suffix == SNAPSHOT and self.whole is None:
            return True
        return self.sound_size != sum(frame.end - frame.start for frame in self.frames)


@dataclass(frozen=True, slots=True)
class ChainRecord:
    """One frame of the chain."""

    file: JournalFile
    frame: JournalFrame


@dataclass(frozen=True, slots=True)
class Chain:
    """The newest complete snapshot and every change after it. Without a complete snapshot and
    the very first change, everything that could be read."""

    files: Sequence[JournalFile]
    records: Sequence[ChainRecord]
    """In the order in which they apply."""
    store: int
    schema: int
    end: int
    """The last transaction before the first gap; 0 if the beginning is missing."""
    last: int
    """The last transaction with any record."""
    sequences: dict[str, int]

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be read."""
        return not self.records

    @property
    def is_whole(self) -> bool:
        """Whether there is no gap up to the last transaction."""
        return self.end == self.last

    @property
    def is_damaged(self) -> bool:
        """Whether any file has corrupt frames."""
        return any(file.is_damaged for file in self.files)

    def changes(self, after: int = -1, until: int | None = None) -> Iterator[list[TableChange]]:
        """The changes of the transactions in (after, until], in order. A snapshot counts as
        the transaction that it follows. Raises OSError."""
        path, data = None, b""
        for record in self.records:
            seq = record.frame.seq
            if seq <= after or (until is not None and seq > until):
                continue
            if record.file.path != path:
                path, data = record.file.path, record.file.path.read_bytes()
            yield decode_changes(record.frame.payload(data))

    def has_all_after(self, seq: int) -> bool:
        """Whether every transaction from `seq` + 1 to the last is present."""
        found = {each.frame.seq for each in self.records if each.frame.kind is FrameKind.CHANGE}
        return all(number in found for number in range(seq + 1, self.last + 1))


def name_of(seq: int, suffix: str) -> str:
    """The name of the file that begins with or after transaction `seq`."""
    return f"{seq:016d}{suffix}"


def seq_of(path: Path) -> int | None:
    """The transaction number in a file name; None if it is not a journal file."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def read_chain(folder: Path) -> Chain:
    """Read and check every file. Raises OSError."""
    files = _read_files(folder)
    every = [ChainRecord(file, frame) for file in files for frame in file.frames]
    if not every:
        return Chain(files, [], 0, 0, 0, 0, {})
    newest = every[-1].frame
    mine = [
        each
        for each in every
        if (each.frame.store, each.frame.schema) == (newest.store, newest.schema)
    ]
    base = next(
        (
            file
            for file in reversed(files)
            if file.whole
            and file.frames[0].store == newest.store
            and file.frames[0].schema == newest.schema
        ),
        None,
    )
    records = _from_base(mine, base)
    last = max((each.frame.seq for each in records), default=0)
    sequences = base.whole.sequences if base is not None and base.whole is not None else {}
    end = _end(records, base)
    return Chain(files, records, newest.store, newest.schema, end, last, sequences)


def _read_files(folder: Path) -> list[JournalFile]:
    """Read every file in order. A file that disappears meanwhile has a successor, which is
    read next."""
    for attempt in range(_ATTEMPTS):
        named = [(seq, path) for path in folder.iterdir() if (seq := seq_of(path)) is not None]
        try:
            return [_read_file(path, seq) for seq, path in sorted(named, key=_order)]
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise
    return []


def _order(named: tuple[int, Path]) -> tuple[int, bool]:
    seq, path = named
    return seq, path.suffix == LOG


def _read_file(path: Path, seq: int) -> JournalFile:
    data = path.read_bytes()
    found = list(frames(data))
    whole = None
    if path.suffix == SNAPSHOT and found and found[-1].kind is FrameKind.WHOLE:
        whole = msgspec.msgpack.decode(found[-1].payload(data), type=SnapshotEnd)
        is_right = len(found) == whole.n_frames + 1 and all(each.seq == seq for each in found)
        whole = whole if is_right else None
    return JournalFile(path, seq, len(data), found, whole)


def _from_base(records: Sequence[ChainRecord], base: JournalFile | None) -> list[ChainRecord]:
    """The records to apply, in order: a snapshot before the changes after it."""
    found = [each for each in records if each.frame.kind is not FrameKind.WHOLE]
    if base is not None:
        found = [
            each
            for each in found
            if each.file is base
            or (each.frame.kind is FrameKind.CHANGE and each.frame.seq > base.seq)
        ]
    found.sort(key=lambda each: (each.frame.seq, each.frame.kind is FrameKind.CHANGE))
    return found


def _end(records: Sequence[ChainRecord], base: JournalFile | None) -> int:
    """The last transaction before the first gap."""
    end = 0 if base is None else base.seq
    if base is None and any(each.frame.kind is FrameKind.ROWS for each in records):
        return 0
    for each in records:
        if each.frame.kind is FrameKind.CHANGE and each.frame.seq <= end + 1:
            end = max(end, each.frame.seq)
    return end
