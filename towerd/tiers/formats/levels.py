"""A prefix whose rows are stored in the formats of a table of levels, to measure the cost."""

from __future__ import annotations

import numpy as np

from towerd.kernels import dispatch
from towerd.slots.layout import NATIVE, KVLayout
from towerd.slots.rows import KVRows
from towerd.tiers.formats.calibration import LEVELS, SHARES, Table, check_table
from towerd.tiers.shrink import SINKS, TAIL


def level_ranges(n: int) -> list[tuple[int, int]]:
    """[start, stop) of each level in a prefix of `n` tokens, without sinks and last rows; the
    ranges are empty if there is nothing between them."""
    first, last = SINKS, max(SINKS, n - TAIL)
    ends = first + np.round(np.cumsum(SHARES) * (last - first)).astype(int)
    return list(zip([first, *ends[:-1].tolist()], ends.tolist(), strict=True))


def stored_parts(rows: KVRows, table: Table) -> list[KVRows]:
    """`rows` (native, positions [0, n)) as consecutive parts, each level in its format. Raises
    ValueError for an invalid table."""
    check_table(table)
    parts, at = [], 0
    for (start, stop), name in zip(level_ranges(len(rows)), table, strict=True):
        if start == stop or name == NATIVE:
            continue
        if at < start:
            parts.append(rows.slice(at, start))
        parts.append(stored(rows.slice(start, stop), name))
        at = stop
    if at < len(rows):
        parts.append(rows.slice(at, len(rows)))
    return parts


def uniform(name: str) -> Table:
    """The table that gives every level the same format."""
    return (name,) * LEVELS


def stored(rows: KVRows, name: str) -> KVRows:
    """Native rows encoded as `name`, where that makes them smaller (`KVLayout.stored_as`)."""
    return encoded(rows, rows.layout.stored_as(name))


def encoded(rows: KVRows, layout: KVLayout) -> KVRows:
    """A copy of native rows as rows of `layout`, which must describe the same values.
    `emit_blob(..., layout=rows.layout)` decodes them."""
    old = rows.layout.planes
    planes = tuple(
        dispatch.transcoded(plane, have.format.name, want.format.name)
        for plane, have, want in zip(rows.planes(), old, layout.planes, strict=True)
    )
    k, v = planes[: layout.n_layer], planes[layout.n_layer :]
    return KVRows(layout, rows.positions, k, v, rows.ext)
