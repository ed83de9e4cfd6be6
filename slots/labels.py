"""The cell labels of sequence blobs of models with M-RoPE, written in place.

In the store, a row's position is the index of its token. llama.cpp gives all tokens of a picture one
position, and tells them apart by row and column. The blob of a unified cache can be relabelled from
one to the other and back without its rows being moved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.slots.cells import EXTENDED
from towerd.slots.errors import StateError
from towerd.slots.rows import HeadRows, KVRows
from towerd.slots.state import PREFIX_BYTES

_COUNTS_BYTES = 8
"""The number of streams, which is 1, and that of cells."""

Labels: TypeAlias = npt.NDArray[np.int32]


def label_tokens(blob: npt.NDArray[np.uint8], p0: int, places: Labels) -> None:
    """Label the cells of a blob that came from llama.cpp with the index of their token.

    p0: the index of the first token; places: int32[n], llama.cpp's position of each. StateError
    unless these are the blob's, with the tokens at one position in order of row and column."""
    cells = _cells(blob)
    found, x, y = cells["pos"], cells["ext"][:, 0], cells["ext"][:, 1]
    order: Any = np.s_[:]
    if not _ascends(found, y, x):
        order = np.lexsort((x, y, found))
        found = found[order]
        if not _ascends(found, y[order], x[order]):
            raise StateError("two cells are at the same place")
    if not np.array_equal(found, places):
        raise StateError("the cells are at other places than their tokens")
    cells["pos"][order] = np.arange(p0, p0 + len(places), dtype=np.int32)


def label_places(blob: npt.NDArray[np.uint8], p0: int, places: Labels) -> None:
    """Label the cells of a blob for llama.cpp: the inverse of `label_tokens`. StateError unless the
    cells are those of the tokens from `p0` on."""
    cells = _cells(blob)
    index = cells["pos"] - np.int32(p0)
    if len(index) != len(places) or index.min() < 0 or index.max() >= len(places):
        raise StateError("the cells are not those of the tokens whose places are given")
    cells["pos"] = places[index]


def head_of_tokens(head: HeadRows, p0: int, places: Labels) -> HeadRows | None:
    """The rows of a head that are at llama.cpp's positions, each at the index of its token; None if there is
    none. Those of media, whose tokens share a position, are left out.

    p0: the index of the first token; places: int32[n], llama.cpp's position of each"""
    rows = head.rows
    first = np.searchsorted(places, rows.positions)
    is_alone = np.searchsorted(places, rows.positions, "right") == first + 1
    if not is_alone.any():
        return None
    k, v = (tuple(plane[is_alone] for plane in planes) for planes in (rows.k, rows.v))
    ext = None if rows.ext is None else rows.ext[is_alone]
    positions = (p0 + first[is_alone]).astype(np.int32)
    return replace(head, rows=KVRows(rows.layout, positions, k, v, ext))


def head_at_places(head: HeadRows, p0: int, places: Labels) -> HeadRows:
    """The inverse: each row at llama.cpp's position for its token, which is alone there."""
    positions = places[head.rows.positions - np.int32(p0)]
    return replace(head, rows=replace(head.rows, positions=positions))


def _cells(blob: npt.NDArray[np.uint8]) -> Any:
    """The cell table, as a writable view."""
    n_stream, n_cells = blob[PREFIX_BYTES : PREFIX_BYTES + _COUNTS_BYTES].view("<u4").tolist()
    start = PREFIX_BYTES + _COUNTS_BYTES
    end = start + n_cells * EXTENDED.itemsize
    if n_stream != 1 or n_cells == 0 or end > len(blob):
        raise StateError("not the blob of a unified cache that holds cells")
    return blob[start:end].view(EXTENDED)


def _ascends(pos: Labels, y: Labels, x: Labels) -> bool:
    """Whether cells are in strictly ascending order of position, row and column."""
    later = pos[1:] > pos[:-1]
    same = pos[1:] == pos[:-1]
    further = (y[1:] > y[:-1]) | ((y[1:] == y[:-1]) & (x[1:] > x[:-1]))
    return bool((later | (same & further)).all())
