"""Cells of a context are in RAM before rows are restored to them.

The pages of unused cells were given back to the system (`context/zero_pages.py`). When llama.cpp writes
to such a page for the first time, the kernel stops it to find one and fill it with zeros: two
microseconds for 4 KiB, three times what copying the row's own bytes costs. So a thread asks for
pages ahead. llama.cpp takes free cells from the beginning on, and what was taken once stays in RAM:
the cells that have pages are always the first ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from towerd.engine.embedded.context.zero_pages import HostBuffer
from towerd.kernels._native import populate
from towerd.slots.layout import KVLayout

SPARE_CELLS = 2048
"""Cells that have pages once the first request was answered."""
SPARE_CELLS_TRANSPOSED = 1792
"""The same where V is transposed: with 2,048 one of two-byte elements would need a second page for
every channel, 24 MB for SmolLM2."""
SPARE_BYTES_MAX = 64 << 20
"""What their rows take at most."""
_BLOCK_CELLS = 64
"""Cells are asked for in blocks of this size, of which a context has whole ones."""


class _Plane(NamedTuple):
    """One layer's K or V in the context: `n_runs` runs, `stride` bytes from each to the next, of
    `cell_bytes` for each cell."""

    base: int
    stride: int
    n_runs: int
    cell_bytes: int


class CellPages:
    """Asks for the pages of one context's cells. Called by the inference thread only."""

    def __init__(
        self, buffers: Sequence[HostBuffer], layout: KVLayout, *, n_cells: int, v_trans: bool
    ) -> None:
        """buffers: the context's that give unused pages back. Nothing is asked for where these are
        not laid out as llama.cpp does it on a CPU: tensor after tensor, K before V in each layer."""
        self._n_cells = n_cells
        self._planes = _find_planes(buffers, layout, n_cells, v_trans)
        n_spare = SPARE_CELLS_TRANSPOSED if v_trans else SPARE_CELLS
        self._n_spare = min(n_spare, SPARE_BYTES_MAX // max(1, layout.token_bytes))
        self._n_asked = 0 if self._planes else n_cells
        self._worker = ThreadPoolExecutor(1, "towerd-cells")

    def close(self) -> None:
        """End the thread. The context must still be there."""
        self._worker.shutdown(cancel_futures=True)

    def ask(self, n: int) -> None:
        """Rows are about to be restored, after which `n` cells are in use: see that these have pages
        soon."""
        self._ask(-(-n // _BLOCK_CELLS) * _BLOCK_CELLS)

    def ask_spare(self) -> None:
        """A request was answered, nothing is being loaded: see that the next conversation finds
        pages. Until then a daemon takes no memory for it."""
        self._ask(self._n_spare)

    def _ask(self, n: int) -> None:
        n = min(self._n_cells, n)
        if n > self._n_asked:
            self._worker.submit(self._populate, self._n_asked, n)
            self._n_asked = n

    def _populate(self, start: int, end: int) -> None:
        for plane in self._planes:
            first, n_bytes = start * plane.cell_bytes, (end - start) * plane.cell_bytes
            if not populate(plane.base + first, plane.stride, plane.n_runs, n_bytes):
                return


def _find_planes(
    buffers: Sequence[HostBuffer], layout: KVLayout, n_cells: int, v_trans: bool
) -> list[_Plane]:
    """The planes of every cache, if there is a buffer of exactly its size for each; else none."""
    rest = list(buffers)
    planes: list[_Plane] = []
    for section in layout.sections if layout.planes else ():
        size = n_cells * sum(plane.row_bytes for plane in section.planes)
        buffer = next((each for each in rest if each.n_bytes == size), None)
        if buffer is None:
            return []
        rest.remove(buffer)
        planes += _planes_of(buffer.base, section, n_cells, v_trans)
    return planes


def _planes_of(base: int, layout: KVLayout, n_cells: int, v_trans: bool) -> Iterator[_Plane]:
    for i, k in enumerate(layout.k):
        yield _Plane(base, 0, 1, k.row_bytes)
        base += n_cells * k.row_bytes
        if not layout.v:
            continue
        v = layout.v[i]
        if v_trans:
            element_bytes = v.format.block_bytes
            yield _Plane(base, n_cells * element_bytes, v.n_elements, element_bytes)
        else:
            yield _Plane(base, 0, 1, v.row_bytes)
        base += n_cells * v.row_bytes
