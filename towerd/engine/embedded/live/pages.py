"""PageFile: rows of a chat that RAM has no room for, in an unnamed file.

The rows of a position are one record. Records of similar positions are adjacent
(`towerd.retention.layout`), so that rows that are recalled together are read in few pieces:

    record    K of layer 0, 1 ... | V of layer 0, 1 ... | extension of the cell, if any

The file disappears with its last reference, at the latest with the process. The checksum of each
record is kept in RAM.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from towerd.errors import TowerdError
from towerd.retention import Positions
from towerd.slots.rows import Bytes2D

if TYPE_CHECKING:
    from towerd.store.encryption.record_cipher import RecordCipher

_BLOCK_ROWS = 256
"""Records that are assembled and written at a time."""
_PIECES_MAX = 512
"""Records in one read: operating systems refuse more than 1,024 pieces."""


class PagesLost(TowerdError):
    """Rows cannot be read back: the disk fails, or returns other bytes than were written."""


class PageFile:
    """An append-only file of records. One thread appends, while no other reads; several threads may
    read."""

    def __init__(self, folder: Path, row_bytes: int, is_encrypted: bool = False) -> None:
        """Make an empty file. is_encrypted: with a key that is in RAM alone. Raises OSError."""
        self._cipher = _new_cipher() if is_encrypted else None
        self.n = 0
        self.row_bytes = row_bytes
        with tempfile.TemporaryFile(dir=folder, prefix="pages-", buffering=0) as file:
            self._fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._fd)
        self._sums = np.empty(0, np.uint32)

    def add(self, parts: tuple[Bytes2D, ...]) -> Positions:
        """Append records, each the concatenation of a row of every uint8[n, any] in `parts`.
        Returns int64[n], their numbers. Raises OSError, such as for a full disk, and then changes
        nothing."""
        numbers = np.arange(self.n, self.n + len(parts[0]))
        sums = np.empty(len(numbers), np.uint32)
        try:
            for first in range(0, len(numbers), _BLOCK_ROWS):
                span = slice(first, first + _BLOCK_ROWS)
                block = np.concatenate([part[span] for part in parts], axis=1)
                sums[span] = [zlib.crc32(row.data) for row in block]
                if self._cipher is not None:
                    block = self._cipher.encrypted(block, self.n + first)
                self._write(block.data.cast("B"), (self.n + first) * self.row_bytes)
        except BaseException:
            with contextlib.suppress(OSError):  # undo what a full disk has taken of them
                os.ftruncate(self._fd, self.n_bytes)
            raise
        self._sums = np.concatenate([self._sums, sums])
        self.n += len(numbers)
        return numbers

    @property
    def n_bytes(self) -> int:
        """Size of the file."""
        return self.n * self.row_bytes

    def read(self, numbers: Positions) -> npt.NDArray[np.uint8]:
        """uint8[m, row_bytes]: the records `numbers`, in that order; consecutive ones are read
        together. Raises PagesLost."""
        order = np.argsort(numbers, kind="stable")
        found = np.empty((len(numbers), self.row_bytes), np.uint8)
        wanted = numbers[order]
        breaks = np.flatnonzero(np.diff(wanted) != 1) + 1
        for run in np.split(order, breaks) if len(order) else []:
            self._read(found, run, numbers)
        if self._cipher is not None:
            self._cipher.decrypt(found, numbers)
        sums = [zlib.crc32(row.data) for row in found]
        if not np.array_equal(np.array(sums, np.uint32), self._sums[numbers]):
            raise PagesLost("Rows of a long chat came back from disk damaged.")
        return found

    def _read(self, found: npt.NDArray[np.uint8], run: Positions, numbers: Positions) -> None:
        """Read consecutive records into `found[run]`."""
        while len(run):
            pieces = [memoryview(found[i]) for i in run[:_PIECES_MAX].tolist()]
            try:
                n_read = os.preadv(self._fd, pieces, int(numbers[run[0]]) * self.row_bytes)
            except OSError as error:
                raise PagesLost(f"Rows of a long chat cannot be read: {error.strerror}.") from error
            # A read may return less than was asked for: on Linux 2 GiB, elsewhere any amount.
            n_whole = n_read // self.row_bytes
            if not n_whole:
                raise PagesLost("The file with rows of a long chat is shorter than it was.")
            run = run[n_whole:]

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            n = os.pwrite(self._fd, data, offset)
            data, offset = data[n:], offset + n


def _new_cipher() -> RecordCipher:
    from towerd.store.encryption.record_cipher import RecordCipher

    return RecordCipher()
