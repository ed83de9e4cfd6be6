"""DailyWrites: how many bytes were written to a store today, and whether a daily budget allows more.

The count is kept in a small file of the store, which its processes share and which outlives them: a
restart, or `kill -9`, brings no new budget. It is not synced, since a power cut may cost a day's
count, but never the store.

    magic | day | bytes of each kind | checksum

A process that is stopped while it counts holds up no other: what cannot be added at once is added with the
next count.

Tokens are never refused: what a budget limits is rows, which can be evaluated again. They leave a part
of it to the catalog, which is written with every turn.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TypeAlias

import xxhash

Kind: TypeAlias = Literal[
    "rows", "reencoded", "checkpoints", "offload", "catalog", "journal", "search"
]
KINDS: tuple[Kind, ...] = (
    "rows", "reencoded", "checkpoints", "offload", "catalog", "journal", "search",
)  # fmt: skip
"""Their order is that of the file."""
SHARES: dict[Kind, float] = {"rows": 0.8, "checkpoints": 0.8, "offload": 0.6, "reencoded": 0.5}
"""Up to which share of the budget each kind is written; the others always are."""
NAME = "written"
_MAGIC = b"TWRDDAY1"
_RECORD = struct.Struct(f"<8sq{len(KINDS)}Q")
_SUM_BYTES = 8
_PAGE_BYTES = 4096
_FRAME_BYTES = 24 + _PAGE_BYTES
_HEADER_BYTES = 32
_SALTS_AT, _SALTS_BYTES, _FRAME_SALTS_AT = 16, 8, 8


class DailyWrites:
    """Thread-safe, and shared between the processes of a store. Never raises: whoever counts must not
    fail for it."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """folder: the store's, which exists."""
        self.budget = 0
        """Bytes a day; 0: no limit."""
        self.n_refused = 0
        """How often something was not written for want of budget, since the start."""
        self._clock = clock
        self._lock = threading.Lock()
        self._day, self._counts = 0, [0] * len(KINDS)
        """What the file says."""
        self._own_day, self._uncounted = 0, [0] * len(KINDS)
        """What is to be added to it, of this day."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(folder / NAME, flags, 0o600)
        except OSError:
            self._fd = -1

    def close(self) -> None:
        """Close the file; what is counted from then on is not kept."""
        if any(self._uncounted):
            self._update("catalog", 0)
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def add(self, kind: Kind, n_bytes: int) -> None:
        """Count bytes that were written."""
        if n_bytes > 0:
            self._update(kind, n_bytes)

    def today(self) -> dict[Kind, int]:
        """The bytes of this day, by kind."""
        return dict(zip(KINDS, self._update("rows", 0), strict=True))

    def allows(self, kind: Kind, n_bytes: int) -> bool:
        """Whether so many bytes may be written now."""
        if not self.budget:
            return True
        is_allowed = sum(self.today().values()) + n_bytes <= SHARES.get(kind, 1.0) * self.budget
        self.n_refused += not is_allowed
        return is_allowed

    @property
    def is_nearly_spent(self) -> bool:
        """Whether so much of the budget is used up today that nothing is encoded again."""
        return bool(self.budget) and sum(self.today().values()) > SHARES["reencoded"] * self.budget

    def stats(self) -> dict[str, Any]:
        """For /metrics and people."""
        found = self.today()
        return {
            "today_bytes": sum(found.values()),
            "budget_bytes": self.budget or None,
            "refused": self.n_refused,
            "kinds": found,
        }

    def _update(self, kind: Kind, n_bytes: int) -> list[int]:
        """Add to the count of today; returns all of it."""
        with self._lock:
            today = day_of(self._clock())
            if today > self._own_day:
                self._uncounted = [0] * len(KINDS)
            self._own_day = today
            self._uncounted[KINDS.index(kind)] += n_bytes
            with suppress(OSError), self._file_locked() as is_locked:
                self._read()
                is_changed = self._begin(today) or any(self._uncounted)
                if is_changed and is_locked:
                    self._write(self._sums())
            return self._sums()

    def _sums(self) -> list[int]:
        return [a + b for a, b in zip(self._counts, self._uncounted, strict=True)]

    @contextmanager
    def _file_locked(self) -> Iterator[bool]:
        """Whether no other process writes the file meanwhile. Raises OSError."""
        try:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield self._fd >= 0
        finally:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _begin(self, today: int) -> bool:
        """Count from zero if a new day has begun; returns whether the day is another one. A clock that
        was set back begins none: the count stays, and the day after it is a new one."""
        if today == self._day:
            return False
        if today > self._day:
            self._counts = [0] * len(KINDS)
        self._day = today
        return True

    def _read(self) -> None:
        if self._fd < 0:
            return
        data = os.pread(self._fd, _RECORD.size + _SUM_BYTES, 0)
        body, digest = data[: _RECORD.size], data[_RECORD.size :]
        if len(body) == _RECORD.size and body.startswith(_MAGIC) and digest == _checksum(body):
            _, self._day, *self._counts = _RECORD.unpack(body)

    def _write(self, counts: list[int]) -> None:
        body = _RECORD.pack(_MAGIC, self._day, *counts)
        os.pwrite(self._fd, body + _checksum(body), 0)
        self._counts, self._uncounted = counts, [0] * len(KINDS)


def day_of(unix_s: float) -> int:
    """The number of the local day of a moment."""
    try:
        offset_s = time.localtime(unix_s).tm_gmtoff
    except (OverflowError, ValueError, OSError):  # a clock beyond what the system has dates for
        offset_s = 0
    return int((unix_s + offset_s) // 86_400)


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_64(body).digest()


class WalMeter:
    """What SQLite writes to a database in WAL mode: each page of a transaction to the log, and later
    to the database, where pages that were changed again meanwhile are written once; they are counted
    as often as in the log. A log that was checkpointed is overwritten from its beginning: its frames have
    the salts of its header, and those that are left of the log before have others
    (https://sqlite.org/fileformat2.html, section 4.1).

    The number of frames also stands in the log's index, but whoever closes that file loses the locks that
    this process has on it."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + "-wal")
        self._salts = b""
        self._n_frames = 0

    def written(self) -> int:
        """Bytes since the last call. For one thread at a time; call it after each transaction."""
        try:
            with self._path.open("rb", buffering=0) as file:
                salts = file.read(_HEADER_BYTES)[_SALTS_AT:][:_SALTS_BYTES]
                n_frames = _frames_with(file, salts)
        except OSError:
            return 0
        is_reset, self._salts = salts != self._salts, salts
        n_new = n_frames if is_reset else n_frames - self._n_frames
        n_moved = self._n_frames if is_reset else 0
        self._n_frames = n_frames
        return int(n_new * _FRAME_BYTES + n_moved * _PAGE_BYTES)


def _frames_with(file: FileIO, salts: bytes) -> int:
    """How many frames from the first on have these salts."""

    def is_current(i: int) -> bool:
        file.seek(_HEADER_BYTES + i * _FRAME_BYTES + _FRAME_SALTS_AT)
        return file.read(_SALTS_BYTES) == salts

    n_frames = (os.fstat(file.fileno()).st_size - _HEADER_BYTES) // _FRAME_BYTES
    return bisect_left(range(max(0, n_frames)), True, key=lambda i: not is_current(i))
