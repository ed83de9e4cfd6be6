"""A prefix kept by a table of levels: which positions are touched, and by which format."""

from __future__ import annotations

import numpy as np
import pytest

from towerd.kernels.formats import BY_NAME
from towerd.slots.blob import emit_blob, parse_blob
from towerd.slots.layout import NATIVE, KVLayout, Plane
from towerd.slots.rows import KVRows
from towerd.tiers.formats.calibration import (
    SHARES,
    Table,
    level_ranges,
    stored,
    stored_parts,
    uniform,
)
from towerd.tiers.shrink import SINKS, TAIL

LAYOUT = KVLayout((Plane(1, 128),) * 2, (Plane(1, 128),) * 2)


def rows(n: int) -> KVRows:
    rng = np.random.default_rng(n)
    planes = [rng.normal(size=(n, 64)).astype(np.float16).view(np.uint8) for _ in range(4)]
    return KVRows(LAYOUT, np.arange(n, dtype=np.int32), tuple(planes[:2]), tuple(planes[2:]))


def values(kept: KVRows) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    """float16[planes, n, 64] of native rows."""
    return np.stack([plane.view(np.float16) for plane in kept.planes()])


@pytest.mark.parametrize("n", [1, 4, 132, 133, 134, 200, 1000])
def test_ranges_cover_all_but_sinks_and_tail(n: int) -> None:
    ranges = level_ranges(n)
    assert len(ranges) == len(SHARES)
    assert ranges[0][0] == SINKS
    assert ranges[-1][1] == max(SINKS, n - TAIL)
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False))
    if n == 1000:
        assert [stop - start for start, stop in ranges] == [347, 261, 260]


def test_each_level_gets_its_format() -> None:
    native, table = rows(400), ("q4h", NATIVE, "q8")
    parts = stored_parts(native, table)
    assert [(p.p0, p.p1) for p in parts] == [(0, 4), (4, 111), (111, 192), (192, 272), (272, 400)]
    names = {plane.format.name for plane in parts[1].layout.planes}
    assert names == {"q4h"}
    assert parts[2].layout == LAYOUT
    assert {plane.format.name for plane in parts[3].layout.planes} == {"q8"}


@pytest.mark.parametrize("name", ["q8", "q8h", "q6h", "q5h", "q4h", "q4ah"])
def test_round_trip_is_near_and_spares_the_ends(name: str) -> None:
    """Through the same path as a restore: decoded straight into a blob."""
    native = rows(300)
    blob = emit_blob(stored_parts(native, uniform(name)), layout=LAYOUT)
    back = values(parse_blob(blob).rows).astype(np.float64)
    want = values(native).astype(np.float64)
    assert (back[:, :SINKS] == want[:, :SINKS]).all()
    assert (back[:, -TAIL:] == want[:, -TAIL:]).all()
    moved = (back - want)[:, SINKS:-TAIL]
    step = 2.0 ** (1 - int(BY_NAME[name].codec.strip("qa")))
    assert 0 < np.sqrt((moved**2).mean()) < step  # of values around 1, at most 3.5


def test_short_prefix_stays_as_it_is() -> None:
    native = rows(SINKS + TAIL)
    (part,) = stored_parts(native, uniform("q4h"))
    assert part is native


def test_stored_keeps_positions_and_planes_that_do_not_gain() -> None:
    q8_0 = BY_NAME["q8_0"]
    layout = KVLayout((Plane(q8_0.type_id, 68),), (Plane(1, 128),))
    some = rows(3)
    native = KVRows(
        layout, some.positions + np.int32(7), (np.zeros((3, 68), np.uint8),), (some.v[0],)
    )
    kept = stored(native, "q8h")
    assert (kept.positions == native.positions).all()
    assert kept.layout.k == layout.k
    assert kept.layout.v[0].format.name == "q8h"


@pytest.mark.parametrize("table", [("q4h",), ("q4h", "q4h", "zip")])
def test_bad_table_is_refused(table: Table) -> None:
    with pytest.raises(ValueError, match="levels"):
        stored_parts(rows(300), table)
