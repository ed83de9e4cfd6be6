"""OffloadedRows: the rows of a chat that may be evicted from its live context and recalled.

llama.cpp frees what is evicted, and rows that were computed over a partial live set exist nowhere
else. They are therefore copied here, once, before a policy that can recall chooses. A row keeps the
rotation of its place in the context, and is recalled to that place.

    RowChunk        rows of the positions that came between two choices, similar keys adjacent
    Pages           a chunk of older rows in a file
    StoredChunk     rows that the store has, in a segment that is mapped
    TurnedChunk     rows of such chunks at other places, their keys rotated when they are read
    OffloadedRows   chunks, which branches of the chat share

All of them are immutable: each operation returns another object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.engine.embedded.live.descent import Descent
from towerd.engine.embedded.live.pages import PageFile
from towerd.kernels import dispatch
from towerd.kernels._native import DciKeys
from towerd.kernels.dci import keys_at
from towerd.retention import Positions, Rows
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import Bytes2D, KVRows

Ext: TypeAlias = npt.NDArray[np.int32]
"""int32[n, 3]: see `KVRows.ext`."""


_READ_ROWS = 1024
"""Rows that are read at once, to be put where they are wanted."""


def _none() -> Positions:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class RowChunk:
    """Rows in RAM, in the order in which they were laid out."""

    layout: KVLayout
    positions: Positions
    """int64[n]: positions in the chat."""
    places: Positions
    """int64[n]: places in the context."""
    k: tuple[Bytes2D, ...]
    v: tuple[Bytes2D, ...]
    ext: Ext | None

    file: ClassVar = None

    @classmethod
    def of(cls, rows: KVRows, positions: Positions, order: Positions) -> RowChunk:
        """Copy `rows` in this order. positions: theirs in the chat; their labels are places."""
        rows = rows.token_major()
        places = rows.positions.astype(np.int64)
        return cls(rows.layout, positions, places, rows.k, rows.v, rows.ext).take(order)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def numbers(self) -> Positions:
        """int64[n]: which rows the positions have."""
        return np.arange(len(self))

    @property
    def n_bytes(self) -> int:
        """RAM that the rows take."""
        return len(self) * self.layout.token_bytes

    def read(self, numbers: Positions) -> tuple[tuple[Bytes2D, ...], Ext | None]:
        """The rows with these numbers, K of all layers and then V, and their extensions."""
        planes = tuple(_gathered(plane, numbers) for plane in (*self.k, *self.v))
        return planes, None if self.ext is None else self.ext[numbers]

    def source(self, numbers: Positions) -> tuple[Sequence[Bytes2D], Ext | None, Positions]:
        """Planes and extensions, and where in them the rows with these numbers are."""
        return (*self.k, *self.v), self.ext, numbers

    def keys(self, layer: int) -> Bytes2D:
        """One layer's K rows."""
        return self.k[layer]

    def take(self, numbers: Positions) -> RowChunk:
        """A copy of the rows with these numbers."""
        (planes, ext), cut = self.read(numbers), len(self.k)
        positions, places = self.positions[numbers], self.places[numbers]
        return RowChunk(self.layout, positions, places, planes[:cut], planes[cut:], ext)

    def lowered(self, descent: Descent) -> RowChunk:
        """The rows where they go to. V is shared."""
        k = descent.keys(dict(enumerate(self.k)), self.layout, self.places)
        places = descent.places(self.places)
        return replace(self, places=places, k=tuple(k.values()), ext=_ext_at(self.ext, places))


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """A chunk on disk; see `RowChunk`. The keys that the chat's index reads stay in RAM. Methods that
    read rows raise PagesLost."""

    layout: KVLayout
    positions: Positions
    places: Positions
    file: PageFile
    records: Positions
    """int64[n]: where each row is in the file."""
    indexed: dict[int, Bytes2D]
    """The K rows of the layers that are indexed, by layer."""

    @classmethod
    def of(
        cls,
        chunk: RowChunk,
        folder: Path,
        file: PageFile | None,
        layers: Iterable[int],
        *,
        is_encrypted: bool = False,
    ) -> Pages:
        """Append `chunk` to `file`, or to a new file in `folder` if it is None. Raises OSError.

        layers: those that are indexed; is_encrypted: whether a new file is"""
        parts = (*chunk.k, *chunk.v)
        if chunk.ext is not None:
            parts = (*parts, np.ascontiguousarray(chunk.ext).view(np.uint8))
        row_bytes = sum(part.shape[1] for part in parts)
        file = file or PageFile(folder, row_bytes, is_encrypted)
        keys = {layer: np.ascontiguousarray(chunk.k[layer]) for layer in layers}
        return cls(chunk.layout, chunk.positions, chunk.places, file, file.add(parts), keys)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def numbers(self) -> Positions:
        """int64[n]: which rows the positions have."""
        return np.arange(len(self))

    @property
    def n_bytes(self) -> int:
        """RAM that the rows take."""
        return sum(keys.nbytes for keys in self.indexed.values())

    def read(self, numbers: Positions) -> tuple[tuple[Bytes2D, ...], Ext | None]:
        ends = np.cumsum([plane.row_bytes for plane in self.layout.planes])
        *planes, rest = np.split(self.file.read(self.records[numbers]), ends, axis=1)
        is_extended = self.layout.cell_ext
        return tuple(planes), np.ascontiguousarray(rest).view(np.int32) if is_extended else None

    def source(self, numbers: Positions) -> tuple[Sequence[Bytes2D], Ext | None, Positions]:
        wanted, at = np.unique(numbers, return_inverse=True)
        return *self.read(wanted), at.astype(np.int64)

    def keys(self, layer: int) -> Bytes2D:
        return self.indexed[layer]

    def take(self, numbers: Positions) -> Pages:
        """The rows with these numbers, in the same file."""
        positions, places = self.positions[numbers], self.places[numbers]
        keys = {layer: _gathered(rows, numbers) for layer, rows in self.indexed.items()}
        return Pages(self.layout, positions, places, self.file, self.records[numbers], keys)


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunk:
    """Rows of a segment of the store, which are read where they are mapped; see `RowChunk`. They stay
    readable when the store drops or replaces the segment, whose disk is free once nothing refers to it.
    """

    data: KVRows
    """All rows of the segment, at their own positions."""
    positions: Positions
    """int64[m], ascending: those that are taken from it."""

    file: ClassVar = None

    @property
    def layout(self) -> KVLayout:
        return self.data.layout

    @property
    def places(self) -> Positions:
        """int64[n] of all rows."""
        return self.data.positions.astype(np.int64)

    @property
    def numbers(self) -> Positions:
        """int64[m]: which rows the positions have."""
        return np.searchsorted(self.data.positions, self.positions).astype(np.int64)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def n_bytes(self) -> int:
        """RAM that the rows take: what is mapped counts as the page cache's."""
        return 0

    def source(self, numbers: Positions) -> tuple[Sequence[Bytes2D], Ext | None, Positions]:
        if not self.data.v_trans:
            return (*self.data.k, *self.data.v), self.data.ext, numbers
        wanted, at = np.unique(numbers, return_inverse=True)
        k = [_gathered(plane, wanted) for plane in self.data.k]
        ext = None if self.data.ext is None else self.data.ext[wanted]
        return (*k, *self._tokens_of_v(wanted)), ext, at.astype(np.int64)

    def _tokens_of_v(self, wanted: Positions) -> Iterator[Bytes2D]:
        """V rows, which are stored channel by channel."""
        for plane, channels in zip(self.layout.v, self.data.v, strict=True):
            width = plane.format.block_bytes
            picked = channels.reshape(len(channels), -1, width)[:, wanted]
            picked = np.ascontiguousarray(picked.reshape(len(channels), -1))
            rows = np.empty((len(wanted), plane.row_bytes), np.uint8)
            dispatch.transpose(picked, rows, width)
            yield rows

    def keys(self, layer: int) -> Bytes2D:
        return self.data.k[layer]

    def take(self, numbers: Positions) -> StoredChunk:
        """Only the positions with these indices."""
        return StoredChunk(self.data, self.positions[numbers])


@dataclass(frozen=True, slots=True, eq=False)
class TurnedChunk:
    """Rows that lie in `chunk` at the places that they had before they went down; see `RowChunk`. Their
    keys are rotated when they are read, but for those that the chat's index reads, which are in RAM. Methods
    that read rows raise PagesLost."""

    chunk: Pages | StoredChunk
    places: Positions
    """int64[n]: where they are now."""
    indexed: dict[int, Bytes2D]
    """The K rows of the layers that are indexed, by layer, rotated."""
    descent: Descent

    @classmethod
    def of(cls, chunk: Pages | StoredChunk, descent: Descent, layers: Iterable[int]) -> TurnedChunk:
        """All rows of `chunk` where they go to. layers: those that are indexed"""
        numbers = chunk.numbers
        lying = chunk.places[numbers]
        keys = {layer: _gathered(chunk.keys(layer), numbers) for layer in layers}
        indexed = descent.keys(keys, chunk.layout, lying)
        if isinstance(chunk, Pages):
            chunk = replace(chunk, indexed={})
        return cls(chunk, descent.places(lying), indexed, descent)

    @property
    def layout(self) -> KVLayout:
        return self.chunk.layout

    @property
    def positions(self) -> Positions:
        return self.chunk.positions

    @property
    def file(self) -> PageFile | None:
        return self.chunk.file

    def __len__(self) -> int:
        return len(self.places)

    @property
    def numbers(self) -> Positions:
        """int64[n]: which rows the positions have."""
        return np.arange(len(self))

    @property
    def n_bytes(self) -> int:
        """RAM that the rows take."""
        return sum(keys.nbytes for keys in self.indexed.values())

    def source(self, numbers: Positions) -> tuple[Sequence[Bytes2D], Ext | None, Positions]:
        wanted, at = np.unique(numbers, return_inverse=True)
        lying = self.chunk.numbers[wanted]
        found, ext, rows = self.chunk.source(lying)
        planes, cut = [_gathered(plane, rows) for plane in found], self.layout.n_layer
        keys = dict(enumerate(planes[:cut]))
        k = self.descent.keys(keys, self.layout, self.chunk.places[lying])
        ext = None if ext is None else _ext_at(ext[rows], self.places[wanted])
        return (*k.values(), *planes[cut:]), ext, at.astype(np.int64)

    def keys(self, layer: int) -> Bytes2D:
        return self.indexed[layer]

    def take(self, numbers: Positions) -> TurnedChunk:
        """The rows with these numbers."""
        chunk, places = self.chunk.take(numbers), self.places[numbers]
        keys = {layer: _gathered(rows, numbers) for layer, rows in self.indexed.items()}
        return TurnedChunk(chunk, places, keys, self.descent)


Chunk: TypeAlias = RowChunk | Pages | StoredChunk | TurnedChunk


@dataclass(frozen=True, slots=True, eq=False)
class OffloadedRows:
    """Rows in chunks. `positions` ascend; each is in exactly one chunk."""

    chunks: tuple[Chunk, ...] = ()
    positions: Positions = field(default_factory=_none)
    """int64[n]"""
    chunk: Positions = field(default_factory=_none)
    number: Positions = field(default_factory=_none)
    """int64[n] both: the chunk that each position is in, and the number of its row there."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def n_bytes(self) -> int:
        """RAM of the rows, including those that branches share."""
        return sum(chunk.n_bytes for chunk in self.chunks)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files that any row is in, including rows of others."""
        return sum(file.n_bytes for file in self.files)

    @property
    def files(self) -> set[PageFile]:
        """The files that any row is in; branches share them."""
        return {chunk.file for chunk in self.chunks if chunk.file is not None}

    @property
    def in_ram(self) -> Positions:
        """int64[n], ascending: the positions whose rows are in RAM."""
        is_there = np.array([isinstance(chunk, RowChunk) for chunk in self.chunks], np.bool_)
        return self.positions[is_there[self.chunk]] if len(self) else self.positions

    @property
    def in_files(self) -> Positions:
        """int64[n], ascending: the positions whose rows are in files of their own."""
        return np.sort(np.concatenate([_none(), *map(self.filed, self.files)]))

    @property
    def copied(self) -> Positions:
        """int64[n], ascending: the positions whose rows are not the store's."""
        is_copied = np.array([not isinstance(chunk, StoredChunk) for chunk in self.chunks], bool)
        return self.positions[is_copied[self.chunk]] if len(self) else self.positions

    @property
    def n_stored(self) -> int:
        """How many rows are the store's."""
        return sum(len(chunk) for chunk in self.chunks if isinstance(chunk, StoredChunk))

    def stored(self, pieces: Iterable[KVRows], more: Positions) -> OffloadedRows:
        """Let go of copies of rows that the store has, in these pieces, if the copies are at the places of
        their positions, and refer to the rows that it has of `more`, int64[n], ascending."""
        there = self.copied
        there = np.union1d(there[self.places(there) == there], np.setdiff1d(more, self.positions))
        new = [StoredChunk(rows, there[np.isin(there, rows.positions)]) for rows in pieces]
        gone = np.concatenate([_none(), *(chunk.positions for chunk in new)])
        left: list[Chunk] = []
        for each in self.chunks:
            stays = ~np.isin(each.positions, gone) | isinstance(each, StoredChunk)
            left.append(each if stays.all() else each.take(np.flatnonzero(stays)))
        return self._of([*left, *new])

    def oldest_file(self) -> PageFile | None:
        """The file with the first position on disk."""
        pages = [chunk for chunk in self.chunks if chunk.file is not None]
        return min(pages, key=lambda chunk: int(chunk.positions.min())).file if pages else None

    def newest_file(self) -> PageFile | None:
        """The file with the last position on disk."""
        pages = [chunk for chunk in self.chunks if chunk.file is not None]
        return max(pages, key=lambda chunk: int(chunk.positions.max())).file if pages else None

    def filed(self, file: PageFile) -> Positions:
        """int64[n], ascending: the positions whose rows are in a file."""
        mine = [chunk.positions for chunk in self.chunks if chunk.file is file]
        return np.sort(np.concatenate([_none(), *mine]))

    @property
    def end(self) -> int:
        """The position after the last one; 0 if there is none."""
        return int(self.positions[-1]) + 1 if len(self) else 0

    @classmethod
    def _of(cls, chunks: Sequence[Chunk]) -> OffloadedRows:
        chunks = tuple(chunk for chunk in chunks if len(chunk))
        if not chunks:
            return cls()
        positions = np.concatenate([chunk.positions for chunk in chunks])
        order = np.argsort(positions, kind="stable")
        which = np.repeat(np.arange(len(chunks)), [len(chunk) for chunk in chunks])
        number = np.concatenate([chunk.numbers for chunk in chunks])
        return cls(chunks, positions[order], which[order], number[order])

    def add(self, chunk: Chunk) -> OffloadedRows:
        """Add the rows of more positions, none of which may be here already."""
        assert not np.isin(chunk.positions, self.positions).any(), "a row is offloaded twice"
        return self._of((*self.chunks, chunk))

    def only(self, stay: Positions) -> OffloadedRows:
        """Keep only the positions in `stay`; the others are freed unless a branch has them."""
        kept = []
        for chunk in self.chunks:
            numbers = np.flatnonzero(np.isin(chunk.positions, stay))
            kept.append(chunk if len(numbers) == len(chunk) else chunk.take(numbers))
        return self._of(kept)

    def without(self, n_from: int) -> OffloadedRows:
        """Drop the positions from `n_from` on."""
        if not len(self) or self.positions[-1] < n_from:
            return self
        return self.only(self.positions[: np.searchsorted(self.positions, n_from)])

    def lowered(self, descent: Descent, layers: Iterable[int], n_rows: int) -> OffloadedRows | None:
        """The same with about `n_rows` of the rows that go down where they go to; None if there are none
        left. layers: those that are indexed"""
        chunks: list[Chunk] = []
        n_left = n_rows
        for chunk in self.chunks:
            places = chunk.places[chunk.numbers]
            moved = descent.moves(places) if n_left > 0 else _none()
            n_left -= len(moved)
            if not len(moved):
                chunks.append(chunk)
            elif isinstance(chunk, RowChunk):
                chunks.append(chunk.lowered(descent))
            else:
                assert not isinstance(chunk, TurnedChunk), "a row goes down twice"
                stay = np.setdiff1d(np.arange(len(chunk)), moved, assume_unique=True)
                chunks += [chunk.take(stay)] if len(stay) else []
                chunks.append(TurnedChunk.of(chunk.take(moved), descent, layers))
        return None if n_left == n_rows else self._of(chunks)

    def rows(self, positions: Positions) -> KVRows:
        """The rows of `positions`, which ascend and must all be here, labelled by their positions.
        Raises PagesLost."""
        return self.mixed(positions[None, None], positions)

    def mixed(self, positions: Positions, labels: Positions) -> KVRows:
        """Rows of which each layer and KV head has those of positions of its own, which must all be here.
        Raises PagesLost.

        positions: int64[layers, KV heads, m], ascending; one layer or head stands for all
        labels: int64[m], ascending: what the rows are labelled by. An extension is that of the first."""
        at = np.searchsorted(self.positions, positions)
        which, number = self.chunk[at], self.number[at]
        layout = self.chunks[0].layout
        planes = [np.empty((len(labels), plane.row_bytes), np.uint8) for plane in layout.planes]
        ext = np.empty((len(labels), 3), np.int32) if layout.cell_ext else None
        for i in np.unique(which).tolist():
            for mine in _pieces(self.chunks[i], which == i, number):
                found, extensions, rows = self.chunks[i].source(number[mine])
                index = np.zeros(mine.shape, np.int64)
                index[mine] = rows
                _put(planes, layout.n_layer, found, mine, index)
                if ext is not None and extensions is not None:
                    ext[mine[0, 0]] = extensions[index[0, 0][mine[0, 0]]]
        cut = layout.n_layer
        return KVRows(
            layout, labels.astype(np.int32), tuple(planes[:cut]), tuple(planes[cut:]), ext
        )

    def places(self, positions: Positions) -> Positions:
        """int64 of the same shape: the places of `positions`, which must all be here, that their keys are
        rotated to."""
        at = np.searchsorted(self.positions, positions)
        found = np.empty(at.shape, np.int64)
        for i in np.unique(self.chunk[at]).tolist():
            mine = self.chunk[at] == i
            found[mine] = self.chunks[i].places[self.number[at[mine]]]
        return found

    def n_reads(self, positions: Positions) -> int:
        """In how many contiguous pieces the rows of these positions lie."""
        at = np.searchsorted(self.positions, positions)
        slots = np.sort(self.chunk[at] * (1 << 32) + self.number[at])
        return int(len(slots) > 0) + int((np.diff(slots) > 1).sum())

    def check_integrity(self) -> None:
        """Raise AssertionError, saying what is wrong, if the parts are inconsistent."""
        assert (np.diff(self.positions) > 0).all(), "offloaded positions ascend"
        assert len(self) == sum(map(len, self.chunks)), "offloaded rows"


class OffloadedKeys:
    """The keys of the offloaded positions numbered `span`; see `towerd.retention.Keys`."""

    def __init__(self, offloaded: OffloadedRows, head_size: int, span: slice = slice(None)) -> None:
        layout = offloaded.chunks[0].layout
        n_kv = layout.k[0].n_elements // head_size
        self._chunks = offloaded.chunks
        self._which = offloaded.chunk[span].astype(np.int32)
        self._number = offloaded.number[span].astype(np.int32)
        self.shape: tuple[int, ...] = (layout.n_layer, n_kv, len(self._which), head_size)

    def read(self, layer: int, head: int, wanted: Positions) -> Rows:
        out = np.empty((len(wanted), self.shape[3]), np.float32)
        which, number = self._which[wanted], self._number[wanted]
        for i in np.unique(which).tolist():
            mine = which == i
            rows = self._plane(self._chunks[i], layer, head)[number[mine]]
            out[mine] = _floats(self._chunks[i].layout.k[layer], rows)
        return out

    def at(self, layer: int, head: int, wanted: Positions) -> DciKeys:
        planes = [self._plane(chunk, layer, head) for chunk in self._chunks]
        formats = [chunk.layout.k[layer].format.name for chunk in self._chunks]
        is_gone = wanted < 0
        which = np.where(is_gone, np.int32(0), self._which[wanted])
        number = np.where(is_gone, np.int32(-1), self._number[wanted])
        return keys_at(planes, formats, which, number, self.shape[3])

    def _plane(self, chunk: Chunk, layer: int, head: int) -> Bytes2D:
        """The rows of one KV head."""
        n_bytes = chunk.layout.k[layer].row_bytes // self.shape[1]
        return chunk.keys(layer)[:, head * n_bytes : (head + 1) * n_bytes]


def _ext_at(ext: Ext | None, places: Positions) -> Ext | None:
    """The extensions of text at these places."""
    if ext is None:
        return None
    return np.stack([places, places, ext[:, 2]], axis=1).astype(np.int32)


def _gathered(plane: Bytes2D, numbers: Positions) -> Bytes2D:
    out = np.empty((len(numbers), plane.shape[1]), np.uint8)
    if len(numbers):
        index = np.ascontiguousarray(numbers, np.int64)
        dispatch.copy_planes(out.reshape(-1), [(0, plane, index)])
    return out


def _pieces(
    chunk: Chunk, mine: npt.NDArray[np.bool_], number: Positions
) -> Iterator[npt.NDArray[np.bool_]]:
    """`mine`, which says what is wanted of a chunk, in parts that need at most _READ_ROWS rows each, if these
    have to be copied to be read. number: of which row, in any shape"""
    wanted = np.empty(0, np.int64)
    if not isinstance(chunk, RowChunk) and len(chunk) > _READ_ROWS:
        wanted = np.unique(number[mine])
    if len(wanted) <= _READ_ROWS:
        yield mine
        return
    part = np.searchsorted(wanted, number, side="right") - 1
    for first in range(0, len(wanted), _READ_ROWS):
        yield mine & (part >= first) & (part < first + _READ_ROWS)


def _put(
    planes: Sequence[Bytes2D],
    n_layer: int,
    found: Sequence[Bytes2D],
    mine: npt.NDArray[np.bool_],
    index: Positions,
) -> None:
    """Copy rows into the K planes of `n_layer` layers, and V planes if there are any, where `mine` says so,
    bool[layers, KV heads, m].

    index: int64 of the same shape: which row of `found`"""
    n_layers, n_heads, _ = mine.shape
    for i, (out, source) in enumerate(zip(planes, found, strict=True)):
        layer = i % n_layer if n_layers > 1 else 0
        width = out.shape[1] // n_heads
        for head in range(n_heads):
            to, span = mine[layer, head], slice(head * width, (head + 1) * width)
            if to.any():
                out[to, span] = source[index[layer, head][to], span]


def keys_of(rows: KVRows, head_size: int, layer_step: int = 1) -> Rows:
    """float32[layers, KV heads, n, head size]: keys of `rows`, of every `layer_step`-th layer."""
    planes = list(zip(rows.layout.k, rows.k, strict=True))[::layer_step]
    layers = [_floats(plane, k) for plane, k in planes]
    return np.stack([k.reshape(len(rows), -1, head_size).transpose(1, 0, 2) for k in layers])


def _floats(plane: Plane, rows: Bytes2D) -> npt.NDArray[np.float32]:
    """float32[n, elements]: the values of `rows`."""
    return dispatch.transcoded(rows, plane.format.name, "f32", 1).view(np.float32)
