"""What a prompt's stored rows cost by their formats, and how many of them it may have."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from calibrations import FORMATS_COST, graded_calibration
from hypothesis import given
from hypothesis import strategies as st
from store_tools import ROW_IDENTITY

from towerd.drift import DecodedRun
from towerd.slots.layout import NATIVE
from towerd.tiers.formats.calibration import SHARES, Table
from towerd.tiers.formats.fidelity import LevelFormats
from towerd.tiers.formats.stored_drift import StoredDrift, stored_drift
from towerd.tiers.shrink import TAIL

TABLE: Table = ("q4h", "q5h", "q6h")
WEIGHTS = (0.2, 0.3, 0.5)
NOTHING_LIVE = np.zeros(0, bool)


def costs() -> StoredDrift:
    return stored_drift(graded_calibration(ROW_IDENTITY, TABLE, WEIGHTS), "near", {}, False)


def excess(runs: list[DecodedRun], n: int) -> float:
    found = costs().of(NOTHING_LIVE, [], runs, n)
    assert found is not None
    return found.excess


def test_the_measured_prompt_costs_the_upper_end_of_what_was_measured() -> None:
    """Of 1,000 tokens each level's part is in its format; other shares cost in proportion."""
    found = graded_calibration(ROW_IDENTITY, TABLE, WEIGHTS).choices["near"].cost
    measured = [
        DecodedRun(0, 400, "q4h"),
        DecodedRun(400, 700, "q5h"),
        DecodedRun(700, 1000, "q6h"),
    ]
    assert excess(measured, 1000) == pytest.approx(found.excess_max)
    scale = found.excess_max / sum(
        w * FORMATS_COST[name] for w, name in zip(WEIGHTS, TABLE, strict=True)
    )
    assert excess([DecodedRun(0, 1000, "q4h")], 1000) == pytest.approx(FORMATS_COST["q4h"] * scale)
    assert excess([DecodedRun(0, 200, "q4h")], 1000) == pytest.approx(
        0.5 * WEIGHTS[0] * FORMATS_COST["q4h"] * scale
    )
    assert excess([], 1000) == 0


def test_rows_near_the_end_cost_what_short_chats_cost() -> None:
    """A short chat that is wholly stored costs what was measured of such; a long one's last rows as much
    more than if they were native."""
    found = graded_calibration(ROW_IDENTITY, TABLE, WEIGHTS)
    whole = replace(found.choices["near"].cost, excess=0.0012, ci=0.0004)
    choice = replace(found.choices["near"], whole=whole)
    near = msgspec.structs.replace(found, choices={"near": choice})
    drift = stored_drift(near, "near", {}, False)

    def cost(p0: int, p1: int, n: int) -> float:
        each = drift.of(NOTHING_LIVE, [], [DecodedRun(p0, p1, "q6h")], n)
        assert each is not None
        return each.excess

    for n in (100, 300):
        assert cost(0, n, n) == pytest.approx(whole.excess_max)
    more = cost(0, 1000, 1000) - excess([DecodedRun(0, 1000, "q6h")], 1000)
    assert cost(0, 1000 - TAIL, 1000) == pytest.approx(excess([DecodedRun(0, 872, "q6h")], 1000))
    assert 0 < more < whole.excess_max


def test_a_format_that_was_not_measured_has_no_known_cost() -> None:
    assert costs().of(NOTHING_LIVE, [], [DecodedRun(0, 10, "q4")], 20) is None
    assert costs().of(NOTHING_LIVE, [], [], 20) is not None


def test_live_rows_count_as_what_they_were_decoded_from() -> None:
    """Not those that were evaluated since; the dearest format where nothing tells."""
    is_decoded = np.repeat([True, False], 50)
    live = [DecodedRun(0, 40, "q4h"), DecodedRun(0, 100, "q6h")]
    for runs, name in ((live, "q6h"), ([], "q4h")):
        found = costs().of(is_decoded, runs, [], 100)
        assert found is not None
        assert found.excess == pytest.approx(excess([DecodedRun(0, 50, name)], 100))


@given(st.lists(st.tuples(st.integers(1, 300), st.sampled_from((*TABLE, NATIVE))), max_size=6))
def test_what_may_come_stays_within_the_bound(lengths: list[tuple[int, str]]) -> None:
    """And one token more would not."""
    runs, at = [], 0
    for n, name in lengths:
        if name != NATIVE:
            runs.append(DecodedRun(at, at + n, name))
        at += n
    total, bound = at + 20, costs().bound
    n = costs().n_within(runs, total)

    def first(n: int) -> float:
        cut = [DecodedRun(p0, min(p1, n), name) for p0, p1, name in runs if p0 < n]
        return excess(cut, total)

    assert first(n) <= bound * (1 + 1e-5)
    assert n == total or first(n + 1) > bound


def test_a_level_reaches_as_far_as_it_was_measured() -> None:
    """However long a prompt is that continues what is shared, it stays within the bound."""
    table = LevelFormats(TABLE, tuple(np.cumsum(SHARES)))
    assert table.stretches(0, 0, 1000) == [(0, 400, "q4h"), (400, 700, "q5h"), (700, 1000, "q6h")]
    assert table.stretches(1, 100, 1000) == [(100, 700, "q5h"), (700, 1000, "q6h")]
    assert table.stretches(65, 100, 1000) == [(100, 1000, "q6h")]
    assert LevelFormats(TABLE).stretches(0, 0, 1000) == [(0, 1000, "q4h")]
    shared = [DecodedRun(*each) for each in table.stretches(0, 4, 1000)]
    for n in (1000, 1100, 3000):
        assert costs().n_within(shared, n) == n
