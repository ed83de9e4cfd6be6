"""Unsigned integers of 7 bits a byte, least significant first; the high bit says "more follows"."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from towerd.codec.errors import Damaged

VALUE_BITS = 35
"""Five bytes at most: every count and id here fits."""


def put(value: int) -> bytes:
    """The bytes of one number, 0 <= value < 2^35."""
    if not 0 <= value < 1 << VALUE_BITS:
        raise ValueError(f"{value} does not fit in {VALUE_BITS} bits")
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def put_all(values: Iterable[int]) -> bytes:
    """The bytes of several numbers."""
    return b"".join(map(put, values))


class VarintReader:
    """Reads numbers and byte runs from the front of `data`; Damaged when it ends too early."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, n_bytes: int) -> bytes:
        """The next `n_bytes` bytes."""
        if n_bytes > len(self.data) - self.at:
            raise Damaged("The blob is damaged: a part of it is longer than the blob.")
        self.at += n_bytes
        return self.data[self.at - n_bytes : self.at]

    def number(self, below: int = 1 << VALUE_BITS) -> int:
        """The next number, which must be under `below`."""
        value = 0
        for shift in range(0, VALUE_BITS, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >= below:
                    raise Damaged(f"The blob is damaged: a count is {value}, not under {below}.")
                return value
        raise Damaged("The blob is damaged: a number does not end.")

    def numbers(self, n: int, below: int = 1 << VALUE_BITS) -> list[int]:
        """The next `n` numbers, which must be under `below`; allocates no more than the remaining bytes
        can hold."""
        if n > len(self.data) - self.at:
            raise Damaged("The blob is damaged: a list is longer than the blob.")
        return [self.number(below) for _ in range(n)]

    def rest(self) -> bytes:
        """All remaining bytes."""
        return self.take(len(self.data) - self.at)

    def end(self) -> None:
        """Damaged if anything is left."""
        if self.at != len(self.data):
            raise Damaged("The blob is damaged: there are bytes after its end.")


def pack(values: npt.NDArray[np.uint32]) -> bytes:
    """`put_all` for uint32[n], vectorised."""
    wide = values.astype(np.uint64)
    shifts = np.arange(0, VALUE_BITS, 7, dtype=np.uint64)
    groups = (wide[:, None] >> shifts) & np.uint64(0x7F)
    used = np.maximum(1, np.sum((wide[:, None] >> shifts) > 0, axis=1))
    columns = np.arange(len(shifts))
    groups |= np.where(columns < used[:, None] - 1, np.uint64(0x80), np.uint64(0))
    packed: npt.NDArray[np.uint8] = groups.astype(np.uint8)[columns < used[:, None]]
    return packed.tobytes()


def unpack(data: bytes, n: int) -> npt.NDArray[np.uint64]:
    """uint64[n]: the inverse of `pack`. Damaged unless `data` is exactly n numbers."""
    raw = np.frombuffer(data, np.uint8)
    last = np.flatnonzero(raw < 0x80)
    if len(last) != n or (len(raw) and raw[-1] >= 0x80):
        raise Damaged("The blob is damaged: its list of ids has another length.")
    starts = np.concatenate(([0], last[:-1] + 1)) if n else last
    if n and int(np.max(last - starts)) >= VALUE_BITS // 7:
        raise Damaged("The blob is damaged: a number does not end.")
    place = np.arange(len(raw)) - np.repeat(starts, last - starts + 1)
    parts = (raw & 0x7F).astype(np.uint64) << (place * 7).astype(np.uint64)
    return np.add.reduceat(parts, starts) if n else np.zeros(0, np.uint64)
