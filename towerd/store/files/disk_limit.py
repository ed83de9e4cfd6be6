"""DiskLimit: how many bytes a store may take on the disk, whatever they are for.

Rows, state checkpoints and what was set aside as damaged leave for it, as they can be evaluated again or are of no
use. Tokens never do: when these alone would exceed it, new requests are refused before they are evaluated.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from towerd.errors import DiskLimitReached

_SPARE_SHARE = 1 / 16
"""Share that rows leave free for what is being written: a file before the one that it replaces is deleted, a
log that SQLite has not merged yet."""
_LOOK_S = 5.0
"""Seconds for which what is on the disk is not counted again."""


class LimitedFolders(Protocol):
    """Where a store has what."""

    root: Path
    segments: Path
    tmp: Path
    quarantine: Path
    checkpoints: Path
    media: Path
    catalog: Path


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes of a store beside its segment files."""

    text: int
    """Catalog, journal, search index, vocabularies: what cannot leave, with room to write the catalog once more."""
    checkpoints: int
    set_aside: int
    media: int
    """Pictures and sounds, which leave last."""


class DiskLimit:
    """The limit of one store. Thread-safe."""

    def __init__(
        self, directory: LimitedFolders, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bytes_max = 0
        """0: no limit."""
        self.unnamed_bytes = 0
        """Bytes that files without a name may take, which no folder shows."""
        self._folders = directory
        self._clock = clock
        self._lock = threading.Lock()
        self._trimming = threading.Lock()
        """Taken before the store's lock."""
        self._use = DiskUse(0, 0, 0, 0)
        self._due_s = float("-inf")
        self._evict: Callable[[int], None] = lambda bytes_max: None
        self._rows_bytes: Callable[[], int] = lambda: 0
        self._trim_checkpoints: Callable[[], None] | None = None
        self._trim_media: Callable[[int], None] = lambda n_bytes: None

    def rows_leave_by(self, evict: Callable[[int], None], rows_bytes: Callable[[], int]) -> None:
        """evict: called with the bytes that segment files may have; rows_bytes: those that they have"""
        self._evict, self._rows_bytes = evict, rows_bytes

    def checkpoints_leave_by(self, trim: Callable[[], None]) -> None:
        """trim: has those leave, soon, that are more than `checkpoint_bytes_max`. Without it none leave."""
        self._trim_checkpoints = trim

    def media_leave_by(self, trim: Callable[[int], None]) -> None:
        """trim: deletes files of media, so many bytes at least"""
        self._trim_media = trim

    @property
    def spare_bytes(self) -> int:
        """Bytes that rows leave free."""
        return int(_SPARE_SHARE * self.bytes_max)

    def use(self) -> DiskUse:
        """As of a few seconds ago at most."""
        with self._lock:
            if self._clock() >= self._due_s:
                self._use = self._look()
                self._due_s = self._clock() + _LOOK_S
            return self._use

    def has_spare(self, n_bytes: int) -> bool:
        """Whether a file of so many bytes may be written beside the one that it replaces."""
        return not self.bytes_max or n_bytes <= self.spare_bytes

    def make_room(self, n_bytes: int) -> bool:
        """Before a segment file of so many bytes is written: have others leave that the disk has no room for beside
        it. Whether there is room then."""
        if not self.bytes_max:
            return True
        self._look_again()  # what was written since the last look counts
        self.trim_checkpoints()
        most = self.rows_bytes_max(self.bytes_max)
        if n_bytes > most:
            return False
        self._evict(most - n_bytes)
        return self._rows_bytes() + n_bytes <= most

    def rows_bytes_max(self, bytes_max: int) -> int:
        """Bytes that segment files may have: at most `bytes_max`, and what the limit leaves for them."""
        if not self.bytes_max:
            return bytes_max
        use = self.use()
        leaves = use.set_aside + (use.checkpoints if self._trim_checkpoints else 0)
        return max(0, min(bytes_max, self._left(use) - leaves))

    def checkpoint_bytes_max(self, bytes_max: int) -> int:
        """Bytes that state checkpoints may have: at most `bytes_max`, and what the limit leaves; rows make room."""
        return max(0, min(bytes_max, self._left(self.use()))) if self.bytes_max else bytes_max

    def has_left(self, n_bytes: int) -> bool:
        """Whether so many bytes may be written beside all that is there; half of what is spare stays for text."""
        if not self.bytes_max:
            return True
        use = self._look()
        taken = use.text + use.media + use.checkpoints + use.set_aside + self._rows_bytes()
        taken += self.unnamed_bytes + self.spare_bytes // 2
        return taken + n_bytes <= self.bytes_max

    def trim_checkpoints(self) -> None:
        """Have state checkpoints leave that what was written since has taken the room of."""
        use = self.use() if self.bytes_max else None
        if use and self._trim_checkpoints and use.checkpoints > self._left(use):
            self._trim_checkpoints()

    def is_short(self) -> bool:
        """Whether what was set aside has to leave."""
        return bool(self.bytes_max) and self.use().set_aside > max(0, self._left(self.use()))

    def check(self) -> None:
        """Raises DiskLimitReached if what cannot leave takes all of it. Pictures and sounds leave before."""
        if self._lacks_room_of_media():
            with self._trimming:  # one request at a time: each would trim all that is lacking
                if self._lacks_room_of_media():
                    self._trim_media_now()
        if self.bytes_max and self._left(self.use()) < 0:
            raise DiskLimitReached(
                f"Conversations, their index and journal need {self.use().text >> 20} MiB of the "
                f"{self.bytes_max >> 20} MiB of --disk-max."
            )

    def _lacks_room_of_media(self) -> bool:
        return bool(self.bytes_max and self.use().media and self._left(self.use()) < 0)

    def _trim_media_now(self) -> None:
        self._look_again()  # what left since the last look counts
        if (left := self._left(self.use())) < 0:
            self._trim_media(-left)
            self._look_again()

    def stats(self) -> dict[str, int | None]:
        """Gauges for /metrics and /towerd/v1/stats; None without a limit."""
        if not self.bytes_max:
            return {"disk_bytes_max": None, "disk_other_bytes": None}
        use = self.use()
        other = use.text + use.media + use.checkpoints + use.set_aside
        return {"disk_bytes_max": self.bytes_max, "disk_other_bytes": other}

    def _left(self, use: DiskUse) -> int:
        """What text leaves for all else."""
        stays = use.text + use.media + (0 if self._trim_checkpoints else use.checkpoints)
        return self.bytes_max - self.spare_bytes - stays - self.unnamed_bytes

    def _look_again(self) -> None:
        with self._lock:
            self._due_s = float("-inf")

    def _look(self) -> DiskUse:
        of = self._folders
        folders = of.segments, of.tmp, of.quarantine, of.checkpoints, of.media
        apart = set(map(str, folders))
        text = sum(_sizes(str(of.root), apart)) + _size(str(of.catalog))
        others = (
            sum(_sizes(str(each), set())) for each in (of.checkpoints, of.quarantine, of.media)
        )
        return DiskUse(text, *others)


def _sizes(folder: str, apart: Collection[str]) -> Iterator[int]:
    """Bytes of the files below a folder, without those of the folders `apart`."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    yield _size(entry.path)
                elif entry.path not in apart:
                    yield from _sizes(entry.path, apart)
    except FileNotFoundError:  # deleted meanwhile
        return


def _size(path: str) -> int:
    """Bytes of the blocks that a file takes, which are fewer than its length if it has holes."""
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0
