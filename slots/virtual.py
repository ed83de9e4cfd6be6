"""Virtual rows: cells that hold, in each layer and for each KV head, the row of another position.

llama.cpp's attention masks read only the labels of cells, keys are stored rotated, and the state calls
write each layer's rows by themselves. So a cell may hold rows of several positions under one label:

    label           0 1 2 3 | 90 91 92 93 | 97 98 99
    layer 0         0 1 2 3 | 17 18 40 77 | 97 98 99
    layer 1         0 1 2 3 |  5 18 60 61 | 97 98 99
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from towerd.kernels import dispatch
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import Bytes2D, KVRows

Ranks = npt.NDArray[np.int64]


class RowGatherer:
    """Gathers rows by layer and KV head, from rows that are read one piece after the other."""

    def __init__(self, layout: KVLayout, ranks: Ranks) -> None:
        """layout: of the pieces
        ranks: int64[layers, KV heads, m], ascending: which row of all pieces each cell gets; one layer
            or head stands for all. StateError for a number of layers or heads that does not fit."""
        n_layers, n_heads, self._m = ranks.shape
        if n_layers not in (1, layout.n_layer):
            raise StateError(f"rows of {n_layers} layers for a cache of {layout.n_layer}")
        for plane in layout.planes:
            if plane.row_bytes % n_heads or (plane.row_bytes // n_heads) % plane.format.block_bytes:
                raise StateError(f"a row of {plane.row_bytes} bytes is not {n_heads} heads")
        self._layout, self._ranks = layout, ranks
        self._out = [np.empty((self._m, plane.row_bytes), np.uint8) for plane in layout.planes]
        self._n_read = 0

    def add(self, piece: KVRows) -> None:
        """Take what is wanted of the next rows."""
        start = self._n_read
        self._n_read += len(piece)
        lines = self._ranks.reshape(-1, self._m)
        bounds = [np.searchsorted(line, (start, self._n_read)).tolist() for line in lines]
        n_heads = self._ranks.shape[1]
        cut = self._layout.n_layer
        for i, (source, out) in enumerate(zip(piece.planes(), self._out, strict=True)):
            layer = (i % cut if cut else 0) if self._ranks.shape[0] > 1 else 0
            width = out.shape[1] // n_heads
            for head in range(n_heads):
                number = layer * n_heads + head
                first, end = bounds[number]
                wanted, span = (
                    lines[number, first:end] - start,
                    slice(head * width, (head + 1) * width),
                )
                _gather(source[:, span], wanted, out[first:end, span])

    def rows(self, positions: npt.NDArray[np.int32], ext: npt.NDArray[np.int32] | None) -> KVRows:
        """The gathered rows, labelled `positions`. StateError if the pieces ended early."""
        if self._m and self._ranks.max() >= self._n_read:
            raise StateError(f"of {int(self._ranks.max()) + 1} rows {self._n_read} were read")
        cut = self._layout.n_layer
        return KVRows(self._layout, positions, tuple(self._out[:cut]), tuple(self._out[cut:]), ext)


def _gather(source: Bytes2D, wanted: Ranks, out: Bytes2D) -> None:
    if not len(wanted):
        return
    if out.flags.c_contiguous:
        dispatch.copy_planes(out.reshape(-1), [(0, source, np.ascontiguousarray(wanted))])
    else:
        out[:] = source[wanted]


def heads_of(planes: Sequence[Plane], head_size: int) -> int:
    """KV heads of a cache whose keys have heads of this size; 1 if its layers differ."""
    found = {plane.n_elements // head_size for plane in planes}
    return found.pop() if len(found) == 1 else 1
