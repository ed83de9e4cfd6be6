"""Token ids, common prefixes of prompts, and the provenance of rows."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
"""int32[n]: the token ids of a text, in order."""
ID_BYTES = 4
_BLOCK = 256
"""Number of ids compared first; each further block is twice as long as the one before."""
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_HASH_SHIFT = np.uint64(29)


def ids_bytes(ids: Ids) -> bytes:
    """Token ids as little-endian int32. ValueError unless they are integers in one dimension."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError("token ids must be integers in one dimension")
    return array.astype("<i4", copy=False).tobytes()


def ids_array(data: bytes) -> Ids:
    """The inverse of `ids_bytes`; a read-only view of `data`."""
    return np.frombuffer(data, np.int32)


def path_bytes(ids: Ids, ends: Sequence[int]) -> bytes:
    """The ids up to the last end, as bytes. Raises ValueError unless `ends` ascends strictly within
    [1, len(ids)]."""
    bounds = [0, *ends, len(ids) + 1]
    if not ends or any(a >= b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(f"ends {list(ends)} must ascend strictly from 1 to {len(ids)}")
    return ids_bytes(ids)[: ends[-1] * ID_BYTES]


def common_prefix(a: npt.NDArray[np.integer], b: npt.NDArray[np.integer]) -> int:
    """The number of leading elements that two arrays share; fast if they differ early."""
    n = min(len(a), len(b))
    start, end = 0, min(n, _BLOCK)
    while start < n:
        differs = a[start:end] != b[start:end]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, end = end, min(n, 3 * end)
    return n


def run_hashes(ids: Ids, n: int, seed: int = 0) -> npt.NDArray[np.uint64]:
    """A hash of each run of `n` successive ids, uint64[len(ids) - n + 1], or empty. seed: below 2^64; other
    seeds, other hashes"""
    n_runs = max(len(ids) - n + 1, 0)
    tokens = np.asarray(ids, np.int64).astype(np.uint64)
    found = np.full(n_runs, seed, np.uint64)
    for i in range(n):
        found = (found ^ tokens[i : i + n_runs]) * _HASH_FACTOR
        found ^= found >> _HASH_SHIFT
    return found


class Provenance(enum.IntEnum):
    """How a row came to be. The values are written to disk: EXACT, DERIVED and AFTER_MOVED are what
    stored rows were computed as (`origin_of`), APPROXIMATE follows from their format, and PARTIAL ones
    are never stored. A later value is a worse one, but for PARTIAL."""

    EXACT = 0
    """Equal to what monolithic prefill computes."""
    DERIVED = 1
    """Computed from earlier rows of which some were approximate."""
    APPROXIMATE = 2
    """Decoded from a quantized stored format."""
    MOVED = 3
    """Computed behind other text, or at another position."""
    AFTER_MOVED = 4
    """Computed from earlier rows of which some were moved."""
    PARTIAL = 5
    """Computed while some of the tokens before it were not live."""


Provenances: TypeAlias = npt.NDArray[np.uint8]
"""uint8[n]: the `Provenance` of each of n rows."""


def are_exact(rows: Provenances) -> bool:
    """Whether all rows equal what monolithic prefill computes."""
    return not rows.any()


def are_storable(rows: Provenances) -> bool:
    """Whether no row is affected by moved rows or by dropped tokens."""
    return bool((rows < Provenance.MOVED).all())


def origin_of(rows: Provenances) -> Provenance:
    """What rows are stored as, all of them alike: EXACT, DERIVED or AFTER_MOVED. None may be
    PARTIAL."""
    if (rows > Provenance.APPROXIMATE).any():
        return Provenance.AFTER_MOVED
    return Provenance.DERIVED if (rows == Provenance.DERIVED).any() else Provenance.EXACT


def provenance_as_kept(origin: Provenance, *, is_native: bool) -> Provenance:
    """The provenance of rows that were computed as `origin` and are kept natively or in a stored
    format."""
    return max(origin, Provenance.EXACT if is_native else Provenance.APPROXIMATE)


def may_replace(new: Provenance, old: Provenance) -> bool:
    """Whether rows of provenance `new` take the place of rows of `old`: exact ones that of all
    others, all others that of moved ones."""
    return new < old and (new == Provenance.EXACT or old > Provenance.APPROXIMATE)


def are_moved(rows: Provenances) -> npt.NDArray[np.bool_]:
    """bool[n]: which rows were moved, or computed from moved ones."""
    found: npt.NDArray[np.bool_] = (rows == Provenance.MOVED) | (rows == Provenance.AFTER_MOVED)
    return found


def count_unmoved(rows: Provenances) -> int:
    """The number of leading rows before the first that was moved or computed from moved ones."""
    moved = are_moved(rows)
    return int(moved.argmax()) if moved.any() else len(rows)


def count_approximate(rows: Provenances) -> int:
    """The number of rows that come from a stored format, were moved or computed from moved ones."""
    return int(np.count_nonzero((rows == Provenance.APPROXIMATE) | are_moved(rows)))


def computed_after(before: Provenances) -> Provenance:
    """The provenance of rows that are computed from the rows `before`."""
    worst = Provenance(int(before.max(initial=Provenance.EXACT)))
    if worst in (Provenance.EXACT, Provenance.PARTIAL):
        return worst
    return Provenance.DERIVED if worst < Provenance.MOVED else Provenance.AFTER_MOVED
