"""Prefix hashes, by which a prompt that continues a frozen conversation is recognised.

The ids of a frozen session are not available for comparison. For every place where a prompt
or reply of a turn ended, the session keeps one number computed from all tokens before it. A
prompt has such a number after each token, all computed in one pass; known numbers name the
sessions to thaw. A hash is only a hint: the ids decide once they are restored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

PrefixHashes = npt.NDArray[np.uint64]

HASH_BYTES = 8
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
"""Minimum bits of the table per hash; twice as many when it is created."""
_TABLE_BITS_MIN = 1 << 12


def prefix_hashes(ids: bytes, scope: str) -> PrefixHashes:
    """The hashes of the first 1, 2, ... n of `ids` (int32 LE) for one tenant, uint64[n].

    Each token and its position go through the finalizer of SplitMix64 (Steele, Lea, Flood 2014);
    a hash is the sum of them, so that all come out of one cumulative sum."""
    tokens = np.frombuffer(ids, "<u4").astype(np.uint64)
    seed = np.frombuffer(hashlib.blake2b(scope.encode(), digest_size=HASH_BYTES).digest(), "<u8")
    value = (np.arange(len(tokens), dtype=np.uint64) << _POSITION_BITS | tokens) + seed + _GOLDEN
    for shift, factor in _MIX:
        value = (value ^ (value >> shift)) * factor
    hashes: PrefixHashes = np.cumsum(value ^ (value >> _LAST_SHIFT), dtype=np.uint64)
    return hashes


def prefix_hashes_at(ids: bytes, scope: str, ends: Iterable[int]) -> list[int]:
    """The hashes of the first `end` ids, for each of `ends` (at least 1)."""
    hashes = prefix_hashes(ids, scope)
    return [int(hashes[end - 1]) for end in ends]


class PrefixHashIndex:
    """Prefix hash -> sessions, in two parallel sorted arrays, behind a table of bits that rejects
    all but at most one in 32 unknown hashes: about 32 bytes per hash. With 100,000 frozen sessions
    a prompt of 8,000 tokens is looked up in 0.1 ms, and would take 1 ms without the table.
    Not thread-safe."""

    def __init__(self) -> None:
        self._hashes: PrefixHashes = np.zeros(0, np.uint64)
        self._sessions = np.zeros(0, np.int64)
        self._make_table()

    def __len__(self) -> int:
        return len(self._hashes)

    def load(self, rows: Iterable[tuple[int, bytes]]) -> None:
        """Replace the content by rows (session, its hashes as stored). An incomplete hash at the
        end of a damaged row is ignored."""
        found = [(pk, hashes[: len(hashes) // HASH_BYTES * HASH_BYTES]) for pk, hashes in rows]
        data = b"".join(hashes for _, hashes in found)
        counts = [len(hashes) // HASH_BYTES for _, hashes in found]
        hashes = np.frombuffer(data, "<u8").astype(np.uint64)
        sessions = np.repeat(np.array([pk for pk, _ in found], np.int64), counts)
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._sessions = hashes[order], sessions[order]
        self._make_table()

    def add(self, session: int, hashes: bytes) -> None:
        """Enter a session's hashes as they are stored (uint64 LE, in any order)."""
        new = np.sort(np.frombuffer(hashes, "<u8").astype(np.uint64))
        places = np.searchsorted(self._hashes, new)
        self._hashes = np.insert(self._hashes, places, new)
        self._sessions = np.insert(self._sessions, places, session)
        if len(self._hashes) * _PLACES_MIN > 8 * len(self._table):
            self._make_table()
        self._enter(new)

    def discard(self, session: int) -> None:
        """Remove a session's hashes, if it has any."""
        kept = self._sessions != session
        self._hashes, self._sessions = self._hashes[kept], self._sessions[kept]

    def find(self, hashes: PrefixHashes) -> Iterator[tuple[int, list[int]]]:
        """(n, sessions) for each known hash of a prompt, longest prefix first."""
        if not len(self._hashes):
            return
        places, bits = self._places(hashes)
        maybe = np.flatnonzero(self._table[places] & bits)
        maybe = maybe[np.argsort(hashes[maybe])]  # sorted look-ups touch neighbouring memory
        first = np.searchsorted(self._hashes, hashes[maybe])
        is_known = self._hashes[np.minimum(first, len(self._hashes) - 1)] == hashes[maybe]
        known = sorted(zip(maybe[is_known].tolist(), first[is_known].tolist(), strict=True))
        for at, start in reversed(known):
            end = np.searchsorted(self._hashes, hashes[at], "right")
            yield at + 1, self._sessions[start:end].tolist()

    def _make_table(self) -> None:
        """Rebuild the table: a bit for each value of the hashes' low bits, set if any hash has
        them. Bits of discarded hashes stay set until the next rebuild and cost a look-up."""
        size = 1 << max(_PLACES_MIN * len(self._hashes) * 2 - 1, _TABLE_BITS_MIN).bit_length()
        self._mask = np.uint64(size - 1)
        self._table = np.zeros(size // 8, np.uint8)
        self._enter(self._hashes)

    def _enter(self, hashes: PrefixHashes) -> None:
        np.bitwise_or.at(self._table, *self._places(hashes))

    def _places(self, hashes: PrefixHashes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """(byte, bit of it) of each hash in the table."""
        return (hashes & self._mask).view(np.int64) >> 3, _BITS[(hashes & _LOW).view(np.int64)]
