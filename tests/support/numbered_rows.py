"""Rows whose bytes depend only on plane and position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import KVRows

F16, Q8 = Plane(1, 128), Plane(8, 68)
LAYOUT = KVLayout((F16, Q8), (Plane(1, 64), Plane(30, 32)))
EXTENDED = KVLayout((F16,), (), cell_ext=True)


def make(p0: int, p1: int, layout: KVLayout = LAYOUT, step: int = 1) -> KVRows:
    """Rows whose bytes depend only on plane and position."""
    positions = np.arange(p0, p1, step, dtype=np.int32)

    def plane(number: int, row_bytes: int) -> npt.NDArray[np.uint8]:
        columns = np.arange(row_bytes) * 7 + number
        return (positions[:, None] * 31 + columns).astype(np.uint8)

    n = layout.n_layer
    planes = [plane(i, p.row_bytes) for i, p in enumerate(layout.planes)]
    ext = np.repeat(positions, 3).reshape(-1, 3) if layout.cell_ext else None
    return KVRows(layout, positions, tuple(planes[:n]), tuple(planes[n:]), ext)


def same(a: KVRows, b: KVRows) -> bool:
    """All bytes equal."""
    if a.ext is None or b.ext is None:
        exts = a.ext is b.ext
    else:
        exts = np.array_equal(a.ext, b.ext)
    return (
        a.layout == b.layout
        and np.array_equal(a.positions, b.positions)
        and all(map(np.array_equal, a.planes(), b.planes()))
        and exts
    )
