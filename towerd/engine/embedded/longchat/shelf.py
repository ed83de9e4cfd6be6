"""Shelf: the rows of a chat that may leave its live context and come back.

llama.cpp frees what is dropped, and rows that were computed under a thinned cache are nowhere
else; so they are copied here, once, before a policy that can recall chooses. A row stays as it was
computed, rotated to the place it had in the context, and comes back to that place.

    chunk      rows of the positions that came between two choices, similar keys side by side
    pages      a chunk of older ones in a file
    shelf      chunks, which branches of the chat share

Nothing is ever changed in place: each operation gives another shelf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.engine.embedded.longchat.keys import floats
from towerd.engine.embedded.longchat.pages import PageFile
from towerd.kernels import dispatch
from towerd.retention import Positions, Rows
from towerd.slots.layout import KVLayout
from towerd.slots.rows import Bytes2D, KVRows

Ext: TypeAlias = npt.NDArray[np.int32]
"""int32[n, 3]: see `KVRows.ext`."""


def _none() -> Positions:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Rows in the order in which they were laid out."""

    layout: KVLayout
    positions: Positions
    """int64[n]: in the chat."""
    places: Positions
    """int64[n]: in the context."""
    k: tuple[Bytes2D, ...]
    v: tuple[Bytes2D, ...]
    ext: Ext | None

    @classmethod
    def of(cls, rows: KVRows, positions: Positions, order: Positions) -> Chunk:
        """`rows`, copied in this order; `positions` of the chat stand for theirs, which are
        places."""
        rows = rows.token_major()
        chunk = cls(rows.layout, positions, rows.positions.astype(np.int64), rows.k, rows.v,
                    rows.ext)  # fmt: skip
        return chunk.take(order)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def n_bytes(self) -> int:
        """RAM that the rows take."""
        return len(self) * self.layout.token_bytes

    def read(self, numbers: Positions) -> tuple[tuple[Bytes2D, ...], Ext | None]:
        """The rows with these numbers, K of all layers, then V; and their extensions."""
        planes = tuple(_gathered(plane, numbers) for plane in (*self.k, *self.v))
        return planes, None if self.ext is None else self.ext[numbers]

    def keys(self, layer: int, numbers: Positions, span: slice) -> Bytes2D:
        """Those bytes of one layer's K rows."""
        return self.k[layer][:, span][numbers]

    def take(self, numbers: Positions) -> Chunk:
        """A copy of those rows."""
        (planes, ext), cut = self.read(numbers), len(self.k)
        positions, places = self.positions[numbers], self.places[numbers]
        return Chunk(self.layout, positions, places, planes[:cut], planes[cut:], ext)


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """A chunk on disk: see `Chunk`. What reads rows raises PagesLost."""

    layout: KVLayout
    positions: Positions
    places: Positions
    file: PageFile
    records: Positions
    """int64[n]: where each row is in the file."""

    @classmethod
    def of(cls, chunk: Chunk, folder: Path, file: PageFile | None = None) -> Pages:
        """`chunk`, written behind what is in `file`, None: to a new one in `folder`. Raises
        OSError."""
        parts = (*chunk.k, *chunk.v)
        if chunk.ext is not None:
            parts = (*parts, np.ascontiguousarray(chunk.ext).view(np.uint8))
        file = file or PageFile(folder, sum(part.shape[1] for part in parts))
        return cls(chunk.layout, chunk.positions, chunk.places, file, file.add(parts))

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def n_bytes(self) -> int:
        """RAM that the rows take."""
        return 0

    def read(self, numbers: Positions) -> tuple[tuple[Bytes2D, ...], Ext | None]:
        ends = np.cumsum([plane.row_bytes for plane in self.layout.planes])
        *planes, rest = np.split(self.file.read(self.records[numbers]), ends, axis=1)
        is_extended = self.layout.cell_ext
        return tuple(planes), np.ascontiguousarray(rest).view(np.int32) if is_extended else None

    def keys(self, layer: int, numbers: Positions, span: slice) -> Bytes2D:
        return self.read(numbers)[0][layer][:, span]

    def take(self, numbers: Positions) -> Pages:
        """Those rows of the same file."""
        positions, places = self.positions[numbers], self.places[numbers]
        return Pages(self.layout, positions, places, self.file, self.records[numbers])


@dataclass(frozen=True, slots=True, eq=False)
class Shelf:
    """Positions ascend; each is in one chunk."""

    chunks: tuple[Chunk | Pages, ...] = ()
    positions: Positions = field(default_factory=_none)
    """int64[n]"""
    chunk: Positions = field(default_factory=_none)
    number: Positions = field(default_factory=_none)
    """Which chunk each position is in, and which of its rows it is."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def n_bytes(self) -> int:
        """RAM of the rows, those that branches share included."""
        return sum(chunk.n_bytes for chunk in self.chunks)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files that any row is in, with what others have there."""
        return sum(file.n_bytes for file in self.files)

    @property
    def files(self) -> set[PageFile]:
        """The files that any row is in; branches share them."""
        return {chunk.file for chunk in self.chunks if isinstance(chunk, Pages)}

    @property
    def in_ram(self) -> Positions:
        """int64[n], ascending: the positions whose rows are in RAM."""
        is_paged = np.array([isinstance(chunk, Pages) for chunk in self.chunks], np.bool_)
        return self.positions[~is_paged[self.chunk]] if len(self) else self.positions

    def oldest_file(self) -> PageFile | None:
        """The file with the first position on disk."""
        pages = [chunk for chunk in self.chunks if isinstance(chunk, Pages)]
        return min(pages, key=lambda chunk: int(chunk.positions.min())).file if pages else None

    def newest_file(self) -> PageFile | None:
        """The file with the last position on disk."""
        pages = [chunk for chunk in self.chunks if isinstance(chunk, Pages)]
        return max(pages, key=lambda chunk: int(chunk.positions.max())).file if pages else None

    def filed(self, file: PageFile) -> Positions:
        """int64[n], ascending: the positions whose rows are in a file."""
        mine = [chunk.positions for chunk in self.chunks
                if isinstance(chunk, Pages) and chunk.file is file]  # fmt: skip
        return np.sort(np.concatenate([_none(), *mine]))

    @property
    def end(self) -> int:
        """What comes after the last position; 0 if there is none."""
        return int(self.positions[-1]) + 1 if len(self) else 0

    @classmethod
    def _of(cls, chunks: Sequence[Chunk | Pages]) -> Shelf:
        chunks = tuple(chunk for chunk in chunks if len(chunk))
        if not chunks:
            return cls()
        positions = np.concatenate([chunk.positions for chunk in chunks])
        order = np.argsort(positions, kind="stable")
        which = np.repeat(np.arange(len(chunks)), [len(chunk) for chunk in chunks])
        number = np.concatenate([np.arange(len(chunk)) for chunk in chunks])
        return cls(chunks, positions[order], which[order], number[order])

    def add(self, chunk: Chunk | Pages) -> Shelf:
        """With the rows of more positions, none of which may be here."""
        assert not np.isin(chunk.positions, self.positions).any(), "a row is shelved twice"
        return self._of((*self.chunks, chunk))

    def only(self, stay: Positions) -> Shelf:
        """With those of `stay` alone; what the others took is free, unless a branch has it."""
        kept = []
        for chunk in self.chunks:
            numbers = np.flatnonzero(np.isin(chunk.positions, stay))
            kept.append(chunk if len(numbers) == len(chunk) else chunk.take(numbers))
        return self._of(kept)

    def without(self, n_from: int) -> Shelf:
        """Without positions from `n_from` on."""
        if not len(self) or self.positions[-1] < n_from:
            return self
        return self.only(self.positions[: np.searchsorted(self.positions, n_from)])

    def rows(self, positions: Positions) -> KVRows:
        """The rows of some positions, ascending, all of which must be here, at their places. Raises
        PagesLost."""
        at = np.searchsorted(self.positions, positions)
        which, number = self.chunk[at], self.number[at]
        layout = self.chunks[0].layout
        planes = [np.empty((len(at), plane.row_bytes), np.uint8) for plane in layout.planes]
        ext = np.empty((len(at), 3), np.int32) if layout.cell_ext else None
        for i in np.unique(which).tolist():
            mine = np.flatnonzero(which == i)
            found, extensions = self.chunks[i].read(number[mine])
            for out, plane in zip(planes, found, strict=True):
                out[mine] = plane
            if ext is not None and extensions is not None:
                ext[mine] = extensions
        places = self.places(positions).astype(np.int32)
        cut = layout.n_layer
        return KVRows(layout, places, tuple(planes[:cut]), tuple(planes[cut:]), ext)

    def places(self, positions: Positions) -> Positions:
        """int64[n]: where some positions, all of which must be here, stood in the context."""
        at = np.searchsorted(self.positions, positions)
        found = np.empty(len(at), np.int64)
        for i in np.unique(self.chunk[at]).tolist():
            mine = self.chunk[at] == i
            found[mine] = self.chunks[i].places[self.number[at[mine]]]
        return found

    def n_reads(self, positions: Positions) -> int:
        """Contiguous pieces that the rows of these positions lie in."""
        at = np.searchsorted(self.positions, positions)
        slots = np.sort(self.chunk[at] * (1 << 32) + self.number[at])
        return int(len(slots) > 0) + int((np.diff(slots) > 1).sum())

    def check_integrity(self) -> None:
        """Raises AssertionError naming what does not add up."""
        assert (np.diff(self.positions) > 0).all(), "shelved positions ascend"
        assert len(self) == sum(map(len, self.chunks)), "rows on the shelf"
        assert (np.diff(self.places(self.positions)) > 0).all(), "shelved places ascend"


class ShelfKeys:
    """The keys of the positions numbered `span` on a shelf; see `towerd.retention.Keys`."""

    def __init__(self, shelf: Shelf, head_size: int, span: slice = slice(None)) -> None:
        layout = shelf.chunks[0].layout
        n_kv = layout.k[0].n_elements // head_size
        self._shelf, self._chunk, self._number = shelf, shelf.chunk[span], shelf.number[span]
        self.shape: tuple[int, ...] = (layout.n_layer, n_kv, len(self._chunk), head_size)

    def __getitem__(self, place: tuple[int, int, Positions], /) -> Rows:
        layer, head, wanted = place
        out = np.empty((len(wanted), self.shape[3]), np.float32)
        which, number = self._chunk[wanted], self._number[wanted]
        for i in np.unique(which).tolist():
            mine = which == i
            chunk = self._shelf.chunks[i]
            plane = chunk.layout.k[layer]
            n_bytes = plane.row_bytes // self.shape[1]
            span = slice(head * n_bytes, (head + 1) * n_bytes)
            out[mine] = floats(plane, chunk.keys(layer, number[mine], span))
        return out


def _gathered(plane: Bytes2D, numbers: Positions) -> Bytes2D:
    out = np.empty((len(numbers), plane.shape[1]), np.uint8)
    if len(numbers):
        dispatch.gather_rows(plane, np.ascontiguousarray(numbers, np.int64), out)
    return out
