"""What the scheduler's side of the connector has the worker's side do in a step.

The two sides may be two processes, so that rows travel with these: by reference within one process, between two as
buffers of vLLM's own messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.slots.rows import Bytes2D, KVRows
from towerd.tokens import Ids, Provenances

Slots: TypeAlias = npt.NDArray[np.int64]
"""Places of tokens in vLLM's cache: a block's number times the tokens of a block, plus the place in it."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredPlanes:
    """Consecutive rows as they are stored: all K planes, then all V planes, uint8[n, row_bytes] each, and the
    format of each plane."""

    planes: tuple[Bytes2D, ...]
    formats: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.planes[0])

    @classmethod
    def of(cls, rows: KVRows) -> StoredPlanes:
        """Views of these rows."""
        names = tuple(plane.format.name for plane in rows.layout.planes)
        return cls(tuple(rows.planes()), names)


@dataclass(frozen=True, slots=True, eq=False)
class RowLoad:
    """Stored rows to write into vLLM's cache before the step's attention reads them."""

    pieces: tuple[StoredPlanes, ...]
    """Consecutive, checked; within one process views of mapped files or of RAM."""
    slots: Slots
    """int64[n]: of each row."""
    block_ids: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class RowSave:
    """Rows to read from vLLM's cache once the step has computed them."""

    number: int
    """Of the `SavedPath` that they are for."""
    slots: Slots
    finished: str | None = None
    """The request whose blocks are kept until the rows are read; None: it continues."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlanes:
    """What a `RowSave` read: planes as in `StoredPlanes`, in the cache's own formats. No planes: the rows may build on
    rows that could not be loaded."""

    number: int
    planes: tuple[Bytes2D, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SavedPath:
    """What is known of rows that are being read."""

    ids: Ids
    """The tokens from the first on; the last of them is that of the last row."""
    scope: str
    p0: int
    """The first row; those before are stored."""
    provenance: Provenances
    """uint8[len(ids)]"""


def slots_of(block_ids: list[int], p0: int, p1: int, block_tokens: int) -> Slots:
    """int64[p1 - p0]: the slots of the tokens [p0, p1) of a request with these blocks."""
    first = p0 // block_tokens
    positions = np.arange(p0, p1)
    blocks = np.asarray(block_ids[first : -(-p1 // block_tokens)], np.int64)
    found: Slots = blocks[positions // block_tokens - first] * block_tokens
    return found + positions % block_tokens


def scheduled(step: Any) -> list[tuple[str, int, int]]:
    """Of each request of a step of vLLM's scheduler its id, how many of its tokens were computed before, and after
    it."""
    cached = step.scheduled_cached_reqs
    before = [
        *zip(cached.req_ids, cached.num_computed_tokens, strict=True),
        *((each.req_id, each.num_computed_tokens) for each in step.scheduled_new_reqs),
    ]
    return [(id, n, n + step.num_scheduled_tokens.get(id, 0)) for id, n in before]
