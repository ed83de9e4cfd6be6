"""The cell table of a state: position, owner and extension of every row that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.slots.errors import StateError
from towerd.slots.reader import ByteReader
from towerd.slots.rows import KVRows

_PLAIN = np.dtype([("pos", "<i4"), ("n_seq", "<u4"), ("seq", "<i4")])
EXTENDED = np.dtype([("pos", "<i4"), ("n_seq", "<u4"), ("ext", "<i4", 3), ("seq", "<i4")])
"""An entry of the table in models with M-RoPE."""


def cell_bytes(cell_ext: bool) -> int:
    """Bytes of one entry of the table."""
    return (EXTENDED if cell_ext else _PLAIN).itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """A checked cell table, sorted by position.

    positions: int32[n], strictly ascending
    ext: int32[n, 3] or None
    seq_id: the sequence that owns every cell
    by_position: int64[n], the cell that holds each position, or None if cells are sorted"""

    positions: npt.NDArray[np.int32]
    ext: npt.NDArray[np.int32] | None
    seq_id: int
    by_position: npt.NDArray[np.int64] | None

    @property
    def order(self) -> npt.NDArray[np.int64] | None:
        """int64[n]: the row (in position order) that each cell holds; None if sorted."""
        if self.by_position is None:
            return None
        order = np.empty_like(self.by_position)
        order[self.by_position] = np.arange(len(order))
        return order


def parse_cells(reader: ByteReader, count: int, cell_ext: bool) -> Cells:
    """Read `count` entries. StateError for negative or duplicate positions and for cells that do not
    all belong to the same sequence and to no other."""
    dtype = EXTENDED if cell_ext else _PLAIN
    table = reader.take(count * dtype.itemsize, f"table of {count} cells").view(dtype)
    if (table["n_seq"] != 1).any():
        raise StateError("a cell does not belong to exactly one sequence (wrong cell_ext?)")
    seq_id = int(table["seq"][0])
    if seq_id < 0 or (table["seq"] != seq_id).any():
        raise StateError("the cells belong to different or negative sequence ids")
    positions = table["pos"].astype(np.int32)
    ext = table["ext"].astype(np.int32) if cell_ext else None
    by_position = None
    if (positions[1:] <= positions[:-1]).any():
        by_position = np.argsort(positions, kind="stable").astype(np.int64)
        positions = positions[by_position]
        ext = None if ext is None else ext[by_position]
    if positions[0] < 0:
        raise StateError(f"position {positions[0]} is negative")
    if (positions[1:] == positions[:-1]).any():
        raise StateError("two cells hold the same position")
    return Cells(positions, ext, seq_id, by_position)


def cell_table(
    parts: Sequence[KVRows], seq_id: int, order: npt.NDArray[np.int64] | None
) -> npt.NDArray[np.uint8]:
    """The table's bytes for the rows of all parts, in `order` (see `Cells.order`)."""
    cell_ext = parts[0].layout.cell_ext
    table = np.empty(sum(len(part) for part in parts), EXTENDED if cell_ext else _PLAIN)
    table["pos"] = np.concatenate([part.positions for part in parts])
    table["n_seq"] = 1
    table["seq"] = seq_id
    if cell_ext:
        table["ext"] = np.concatenate([part.ext for part in parts if part.ext is not None])
    return (table if order is None else table[order]).view(np.uint8)
