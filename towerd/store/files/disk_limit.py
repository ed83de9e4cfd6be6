"""DiskLimit: how many bytes a store may take on the disk, whatever they are for.

Rows and state checkpoints leave for it, as they can be evaluated again. Tokens never do: when these alone
would exceed it, new requests are refused before they are evaluated.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from towerd.errors import DiskLimitReached

_SPARE_SHARE = 1 / 16
"""Share that rows leave free for what is being written: a file before the one that it replaces is deleted, a
log that SQLite has not merged yet."""
_LOOK_S = 5.0
"""Seconds for which what is on the disk is not counted again."""


class DiskLimit:
    """The limit of one store. Thread-safe."""

    def __init__(
        self, root: Path, segments: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """root: the store's directory; segments: the one in it whose files the catalog counts"""
        self.bytes_max = 0
        """0: no limit."""
        self.unnamed_bytes = 0
        """Bytes that files without a name may take, which no folder shows."""
        self._root, self._segments = root, segments
        self._clock = clock
        self._lock = threading.Lock()
        self._other_bytes = 0
        self._due_s = float("-inf")

    @property
    def spare_bytes(self) -> int:
        """Bytes that rows leave free."""
        return int(_SPARE_SHARE * self.bytes_max)

    def other_bytes(self) -> int:
        """Bytes of everything but segment files: catalog, journal, search index, checkpoints, what was set aside.
        As of a few seconds ago at most."""
        with self._lock:
            if self._clock() >= self._due_s:
                self._other_bytes = self.unnamed_bytes + sum(self._sizes(str(self._root)))
                self._due_s = self._clock() + _LOOK_S
            return self._other_bytes

    def has_spare(self, n_bytes: int) -> bool:
        """Whether a file of so many bytes may be written beside those that there are."""
        return not self.bytes_max or n_bytes <= self.spare_bytes

    def rows_bytes_max(self, bytes_max: int) -> int:
        """Bytes that segment files may have: at most `bytes_max`, and what the limit leaves for them."""
        if not self.bytes_max:
            return bytes_max
        left = self.bytes_max - self.spare_bytes - self.other_bytes()
        return max(0, min(bytes_max, left))

    def check(self) -> None:
        """Raises DiskLimitReached if what cannot leave takes all of it."""
        if self.bytes_max and (n_bytes := self.other_bytes()) > self.bytes_max - self.spare_bytes:
            raise DiskLimitReached(
                f"Conversations, their index and journal take {n_bytes >> 20} MiB of the "
                f"{self.bytes_max >> 20} MiB of --disk-max: raise it, or delete some and run towerctl gc."
            )

    def stats(self) -> dict[str, int | None]:
        """Gauges for /metrics and /towerd/v1/stats; None without a limit."""
        if not self.bytes_max:
            return {"disk_bytes_max": None, "disk_other_bytes": None}
        return {"disk_bytes_max": self.bytes_max, "disk_other_bytes": self.other_bytes()}

    def _sizes(self, folder: str) -> Iterator[int]:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.path != str(self._segments):
                            yield from self._sizes(entry.path)
                    else:
                        yield _allocated(entry)
        except FileNotFoundError:  # deleted meanwhile
            return


def _allocated(entry: os.DirEntry[str]) -> int:
    """Bytes of the blocks that a file takes, which are fewer than its length if it has holes."""
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0
