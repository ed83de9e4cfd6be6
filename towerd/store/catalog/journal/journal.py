"""The journal's folder: scanning, appending to and rewriting snapshots and logs.

`<seq>.snapshot` holds every row of the catalog after transaction `seq`. `<seq>.log` holds
the changes of the transactions after `seq`. The newest complete snapshot and the logs from
it on form a second copy of the catalog: the chain. A snapshot appears under its name only when it
is complete and durable; the files that it replaces are removed after that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from towerd.store.catalog.journal.frames import FrameKind, JournalFrame, encode_frame, frames
from towerd.store.catalog.journal.tables import TableChange, decode_changes, encode_changes
from towerd.store.catalog.schema import VERSION, VERSION_MIN
from towerd.store.files import durable
from towerd.store.files.directory import remove_file

if TYPE_CHECKING:
    from towerd.store.encryption.vault import Vault

SNAPSHOT = ".snapshot"
LOG = ".log"
_ATTEMPTS = 3
_ZEROS = 16
"""Hardly any frame ends in more of them."""
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
    is_foreign: bool = False
    """Whether it has frames that were sealed with keys of another store, or with none that is known."""
    is_cut_short: bool = False
    """Whether all that is corrupt in this log was never written: it ends in zeros, which a power cut leaves of
    what was not synced."""

    @property
    def sound_size(self) -> int:
        """The offset at which the last sound frame ends."""
        return self.frames[-1].end if self.frames else 0

    @property
    def is_damaged(self) -> bool:
        """Whether bytes before the last sound frame are corrupt, or a snapshot is incomplete.
        A log that ends in half a frame was cut off by a crash and is not damaged."""
        if self.is_foreign or (self.path.suffix == SNAPSHOT and self.whole is None):
            return True
        return self.sound_size != sum(frame.end - frame.start for frame in self.frames)


@dataclass(frozen=True, slots=True)
class Chain:
    """The newest complete snapshot and every change after it. Without a complete snapshot and
    the very first change, everything that could be read."""

    files: Sequence[JournalFile]
    records: Sequence[JournalFrame]
    """In the order in which they apply."""
    store: int
    schema: int
    """That of its last record."""
    end: int
    """The last transaction before the first gap; 0 if the beginning is missing."""
    last: int
    """The last transaction with any record."""
    sequences: dict[str, int]
    vault: Vault | None = None
    """What its sealed records are unsealed with."""

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

    @property
    def is_cut_short(self) -> bool:
        """Whether all that is damaged are logs that a power cut has cut short."""
        return all(file.is_cut_short for file in self.files if file.is_damaged)

    @property
    def is_plain(self) -> bool:
        """Whether any record can be read without a key."""
        return not all(frame.is_sealed for file in self.files for frame in file.frames)

    def changes(self, after: int = -1, until: int | None = None) -> Iterator[list[TableChange]]:
        """The changes of the transactions in (after, until], in order. A snapshot counts as
        the transaction that it follows. Raises OSError."""
        path, data = None, b""
        for record in self.records:
            seq = record.seq
            if seq <= after or (until is not None and seq > until):
                continue
            if record.path != path:
                path, data = record.path, record.path.read_bytes()
            yield decode_changes(record.payload(data, self.vault))

    def has_all_after(self, seq: int) -> bool:
        """Whether every transaction from `seq` + 1 to the last is present."""
        found = {each.seq for each in self.records if each.kind is FrameKind.CHANGE}
        return all(number in found for number in range(seq + 1, self.last + 1))


def name_of(seq: int, suffix: str) -> str:
    """The name of the file that begins with or after transaction `seq`."""
    return f"{seq:016d}{suffix}"


def seq_of(path: Path) -> int | None:
    """The transaction number in a file name; None if it is not a journal file."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def read_chain(folder: Path, vault: Vault | None = None) -> Chain:
    """Read and check every file. vault: of an encrypted store. Raises OSError, or StoreError if it is encrypted and
    there is no vault."""
    files = _read_files(folder, vault)
    every = [frame for file in files for frame in file.frames]
    if not every:
        return Chain(files, [], 0, 0, 0, 0, {}, vault)
    newest = every[-1]
    mine = [each for each in every if _belongs_to(each, newest)]
    base = next(
        (file for file in reversed(files) if file.whole and _belongs_to(file.frames[0], newest)),
        None,
    )
    records = _from_base(mine, base)
    last = max((each.seq for each in records), default=0)
    sequences = base.whole.sequences if base is not None and base.whole is not None else {}
    end = _end(records, base)
    return Chain(files, records, newest.store, newest.schema, end, last, sequences, vault)


def _belongs_to(frame: JournalFrame, newest: JournalFrame) -> bool:
    """Whether a frame is of the store of the newest one, and of its schema, or of one before it whose
    tables that has as well."""
    is_read = VERSION_MIN <= frame.schema <= newest.schema <= VERSION
    return frame.store == newest.store and (is_read or frame.schema == newest.schema)


def _read_files(folder: Path, vault: Vault | None) -> list[JournalFile]:
    """Read every file in order. A file that disappears meanwhile has a successor, which is
    read next."""
    for attempt in range(_ATTEMPTS):
        named = [(seq, path) for path in folder.iterdir() if (seq := seq_of(path)) is not None]
        try:
            return [_read_file(path, seq, vault) for seq, path in sorted(named, key=_order)]
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise
    return []


def _order(named: tuple[int, Path]) -> tuple[int, bool]:
    seq, path = named
    return seq, path.suffix == LOG


def _read_file(path: Path, seq: int, vault: Vault | None) -> JournalFile:
    data = path.read_bytes()
    every = list(frames(path, data, vault))
    found = [each for each in every if each.is_readable]
    whole = None
    if path.suffix == SNAPSHOT and found and found[-1].kind is FrameKind.WHOLE:
        whole = msgspec.msgpack.decode(found[-1].payload(data, vault), type=SnapshotEnd)
        is_right = len(found) == whole.n_frames + 1 and all(each.seq == seq for each in found)
        whole = whole if is_right else None
    is_foreign = len(found) < len(every)
    is_cut_short = path.suffix == LOG and not is_foreign and _ends_in_zeros(data, found)
    return JournalFile(path, seq, len(data), found, whole, is_foreign, is_cut_short)


def _ends_in_zeros(data: bytes, found: Sequence[JournalFrame]) -> bool:
    """Whether each run of bytes before one of these frames, and behind the one before it, does."""
    starts = [0, *(frame.end for frame in found)]
    gaps = [data[start : frame.start] for start, frame in zip(starts, found, strict=False)]
    return not any(gap[-_ZEROS:].strip(b"\0") for gap in gaps)


def _from_base(records: Sequence[JournalFrame], base: JournalFile | None) -> list[JournalFrame]:
    """The records to apply, in order: a snapshot before the changes after it."""
    found = [each for each in records if each.kind is not FrameKind.WHOLE]
    if base is not None:
        found = [
            each
            for each in found
            if each.path == base.path or (each.kind is FrameKind.CHANGE and each.seq > base.seq)
        ]
    found.sort(key=lambda each: (each.seq, each.kind is FrameKind.CHANGE))
    return found


def _end(records: Sequence[JournalFrame], base: JournalFile | None) -> int:
    """The last transaction before the first gap."""
    end = 0 if base is None else base.seq
    if base is None and any(each.kind is FrameKind.ROWS for each in records):
        return 0
    for each in records:
        if each.kind is FrameKind.CHANGE and each.seq <= end + 1:
            end = max(end, each.seq)
    return end


GROWN_BYTES_MIN = 1 << 20
"""A log below this size is never rewritten because of its size."""
UNFINISHED = ".unfinished"

SetAside: TypeAlias = Callable[[Path], bool]


class Journal:
    """The files of one store. Not thread-safe, except that `write_snapshot` may run beside
    every other method."""

    def __init__(self, folder: Path, schema: int, vault: Vault | None = None) -> None:
        """Create `folder` if it is missing. vault: of an encrypted store. Raises OSError."""
        self.folder = folder
        self._vault = vault
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in folder.glob("*" + UNFINISHED + "*"):
            remove_file(path)
        self._schema = schema
        self._store = 0
        self._fd = -1
        self._is_named = False
        """The log's name is durable."""
        self._path = folder
        self._start = 0
        self._end = 0
        self._snapshot_bytes = 0
        self.n_written = 0
        """Bytes since the start."""
        self.is_behind = False
        """A record is missing or a rewrite failed, so the journal must be rewritten."""
        self._is_short = False
        """A record is missing until the rewrite that has begun is done."""

    def read(self) -> Chain:
        """Read and check every file. Raises OSError."""
        return read_chain(self.folder, self._vault)

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
        frame = self._frame(FrameKind.CHANGE, self._store, seq, encode_changes(changes))
        self._start = self._end
        try:
            at = 0
            while at < len(frame):
                at += os.write(self._fd, frame[at:])
        except OSError:
            self.take_back()
            raise
        self._end += len(frame)
        self.n_written += len(frame)

    def take_back(self) -> None:
        """Remove the last record, because its transaction failed."""
        try:
            os.ftruncate(self._fd, self._start)
            self._end = self._start
        except OSError:
            self.is_behind = True

    def sync(self) -> None:
        """Make appended records durable, and the names of the log and its folder. Raises OSError."""
        durable.sync(self._fd)
        if not self._is_named and not self.is_lost:
            durable.sync_dir(self.folder)
            durable.sync_dir(self.folder.parent)
            self._is_named = True

    def close(self) -> None:
        """Close the log."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def rotate(self, seq: int) -> None:
        """Begin a new log after transaction `seq`, which a rewrite is to precede. If it raises OSError,
        the old one stays."""
        self._is_short |= not self.is_complete
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.is_lost or self._path != self.folder / name_of(seq, LOG):
            before = self._fd
            self._open(seq, 0)
            os.close(before)
        self.is_behind = False

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
                    file.write(self._frame(FrameKind.ROWS, store, seq, payload))
                    n_frames += 1
                end = msgspec.msgpack.encode(SnapshotEnd(n_frames, sequences))
                file.write(self._frame(FrameKind.WHOLE, store, seq, end))
                file.flush()
                durable.sync(file.fileno())
                size = file.tell()
            os.replace(unfinished, path)
        except BaseException:
            remove_file(unfinished)
            raise
        durable.sync_dir(self.folder)
        self._is_short = False
        self._snapshot_bytes = size
        self.n_written += size
        for old in self._older(seq):
            remove_file(old)

    @property
    def is_complete(self) -> bool:
        """Whether every change is in the journal by now, synced or not."""
        return not (self.is_behind or self._is_short or self.is_lost)

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

    def _frame(self, kind: FrameKind, store: int, seq: int, payload: bytes) -> bytes:
        return encode_frame(kind, self._schema, store, seq, payload, self._vault)

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
        self._fd, self._path, self._is_named = fd, path, False
        self._start = self._end = size
