"""Marks: hashes by which a prompt that continues a frozen conversation is recognised.

The ids of a frozen session are not available for comparison. For every place where a prompt
or reply of a turn ended, the session keeps one number computed from all tokens before it. A
prompt has such a number after each token, all computed in one pass; known numbers name the
sessions to thaw. A mark is only a hint: the ids decide once they are restored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[np.uint64]

MARK_BYTES = 8
_POSITION_BITS = np.uint64(32)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT = np.uint64(31)
_LOW = np.uint64(7)
_BITS = np.left_shift(1, np.arange(8)).astype(np.uint8)
_PLACES_MIN = 32
"""Minimum bits of the table per mark; twice as many when it is created."""
_TABLE_BITS_MIN = 1 << 12


def prefix_marks(ids: bytes, scope: str) -> Marks:
    """uint64[n]: the mark of the first 1, 2, ... n of `ids` (int32 LE), for one tenant.

    Each token and its position go through the finalizer of SplitMix64 (Steele, Lea, Flood 2014);
    a mark is the sum of them, so that all come out of one cumulative sum."""
    tokens = np.frombuffer(ids, "<u4").astype(np.uint64)
    seed = np.frombuffer(hashlib.blake2b(scope.encode(), digest_size=MARK_BYTES).digest(), "<u8")
    value = (np.arange(len(tokens), dtype=np.uint64) << _POSITION_BITS | tokens) + seed + _GOLDEN
    for shift, factor in _MIX:
        value = (value ^ (value >> shift)) * factor
    marks: Marks = np.cumsum(value ^ (value >> _LAST_SHIFT), dtype=np.uint64)
    return marks


def marks_at(ids: bytes, scope: str, ends: Iterable[int]) -> list[int]:
    """The marks of the first `end` ids, for each of `ends` (at least 1)."""
    marks = prefix_marks(ids, scope)
    return [int(marks[end - 1]) for end in ends]


class MarkIndex:
    """Mark -> sessions, in two parallel sorted arrays, behind a table of bits that tells all but
    one in 32 marks or more that are not there apart at a glance: about 32 bytes a mark. Not
    thread-safe."""

    def __init__(self) -> None:
        self._marks: Marks = np.zeros(0, np.uint64)
        self._sessions = np.zeros(0, np.int64)
        self._make_table()

    def __len__(self) -> int:
        return len(self._marks)

    def load(self, rows: Iterable[tuple[int, bytes]]) -> None:
        """Take the place of all by (session, its marks as they are stored). Of a damaged row that
        does not end with a whole mark the rest is left out."""
        found = [(pk, marks[: len(marks) // MARK_BYTES * MARK_BYTES]) for pk, marks in rows]
        data = b"".join(marks for _, marks in found)
        counts = [len(marks) // MARK_BYTES for _, marks in found]
        marks = np.frombuffer(data, "<u8").astype(np.uint64)
        sessions = np.repeat(np.array([pk for pk, _ in found], np.int64), counts)
        order = np.argsort(marks, kind="stable")
        self._marks, self._sessions = marks[order], sessions[order]
        self._make_table()

    def add(self, session: int, marks: bytes) -> None:
        """Enter a session's marks as they are stored (uint64 LE, in any order)."""
        new = np.sort(np.frombuffer(marks, "<u8").astype(np.uint64))
        places = np.searchsorted(self._marks, new)
        self._marks = np.insert(self._marks, places, new)
        self._sessions = np.insert(self._sessions, places, session)
        if len(self._marks) * _PLACES_MIN > 8 * len(self._table):
            self._make_table()
        self._enter(new)

    def discard(self, session: int) -> None:
        """Remove a session's marks, if it has any."""
        kept = self._sessions != session
        self._marks, self._sessions = self._marks[kept], self._sessions[kept]

    def find(self, marks: Marks) -> Iterator[tuple[int, list[int]]]:
        """(n, sessions) for each of the marks of a prompt that is known, the longest first."""
        if not len(self._marks):
            return
        places, bits = self._places(marks)
        maybe = np.flatnonzero(self._table[places] & bits)
        maybe = maybe[np.argsort(marks[maybe])]  # neighbours are looked for in neighbouring places
        first = np.searchsorted(self._marks, marks[maybe])
        is_known = self._marks[np.minimum(first, len(self._marks) - 1)] == marks[maybe]
        known = sorted(zip(maybe[is_known].tolist(), first[is_known].tolist(), strict=True))
        for at, start in reversed(known):
            end = np.searchsorted(self._marks, marks[at], "right")
            yield at + 1, self._sessions[start:end].tolist()

    def _make_table(self) -> None:
        """A bit for each value of the marks' low bits: whether any mark has them. What was
        discarded stays in it until it is made anew, and costs a look."""
        size = 1 << max(_PLACES_MIN * len(self._marks) * 2 - 1, _TABLE_BITS_MIN).bit_length()
        self._mask = np.uint64(size - 1)
        self._table = np.zeros(size // 8, np.uint8)
        self._enter(self._marks)

    def _enter(self, marks: Marks) -> None:
        np.bitwise_or.at(self._table, *self._places(marks))

    def _places(self, marks: Marks) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """(byte, bit of it) of each mark in the table."""
        return (marks & self._mask).view(np.int64) >> 3, _BITS[(marks & _LOW).view(np.int64)]
