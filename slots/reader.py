"""A cursor over untrusted bytes that hands out views and never reads past the end."""

from __future__ import annotations

import struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.slots.errors import StateError

Data: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
"""Anything with the buffer protocol and contiguous bytes (an mmap too)."""


def as_bytes(data: Data) -> npt.NDArray[np.uint8]:
    """`data` as uint8[n] without a copy. StateError unless it is a contiguous buffer."""
    try:
        return np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise StateError(f"not a contiguous buffer of bytes: {error}") from error


class ByteReader:
    """Reads little-endian values and byte runs in order; every read names what it reads, so
    that the StateError for missing bytes says what is missing."""

    def __init__(self, data: Data) -> None:
        self._data = as_bytes(data)
        self._at = 0

    @property
    def remaining(self) -> int:
        """Bytes not read yet."""
        return len(self._data) - self._at

    def take(self, n_bytes: int, what: str) -> npt.NDArray[np.uint8]:
        """The next `n_bytes` bytes as a view."""
        if n_bytes > self.remaining:
            raise StateError(
                f"truncated: {what} needs {n_bytes} bytes at offset {self._at}, "
                f"{self.remaining} are left"
            )
        self._at += n_bytes
        return self._data[self._at - n_bytes : self._at]

    def u32(self, what: str) -> int:
        """The next unsigned 32-bit integer."""
        return self._number("<I", what)

    def i32(self, what: str) -> int:
        """The next signed 32-bit integer."""
        return self._number("<i", what)

    def u64(self, what: str) -> int:
        """The next unsigned 64-bit integer."""
        return self._number("<Q", what)

    def finish(self) -> None:
        """StateError if anything is left."""
        if self.remaining:
            raise StateError(f"{self.remaining} bytes follow the end of the state")

    def _number(self, code: str, what: str) -> int:
        raw = self.take(struct.calcsize(code), what)
        value: int = struct.unpack(code, raw.data)[0]
        return value
