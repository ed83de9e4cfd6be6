"""Where little of a day's budget is left, rows are transform-coded at once instead of being written twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformed import (
    IDENTITY,
    IDS,
    basis,
    coded_rows_of,
    library_decodes,
    planes_of,
    same,
    transform,
)
from waiting import until

from towerd.errors import DiskFull
from towerd.slots.layout import NATIVE
from towerd.store import Node, Store, Turn
from towerd.store.files.writes import SHARES
from towerd.store.rows.recoding import STEP_ROWS, CodingInterrupted
from towerd.tiers.formats.calibration import FormatCost
from towerd.tiers.formats.fidelity import LevelFormats
from towerd.tiers.formats.transform import TransformCost
from towerd.tiers.manager import Tiers
from towerd.tiers.shrink import SINKS, TAIL, Shrinker
from towerd.tiers.writer import RowsWriter, TierCounters
from towerd.tokens import Provenance

N = 900
INNER = N - SINKS - TAIL
AFTER_S, LONGER_S = 100.0, 1000.0
BUDGET = 1 << 30
COST = TransformCost((transform(),), FormatCost(0.004, 0.001, 0.0, 0.97, 8.0, 1024), 2.0, 0.002)


class Clock:
    """A clock that stands until it is moved."""

    now = 1.7e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with Store.open(tmp_path / "store", IDENTITY, clock=clock) as opened:
        opened.rows.bases.add(basis())
        opened.writes.budget = BUDGET
        yield opened


@pytest.fixture
def tiers(store: Store, clock: Clock) -> Iterator[Tiers]:
    found = Tiers(
        store, IDENTITY.layout, v_trans=False, hot_bytes=1 << 30, warm_bytes=1 << 40, policy="lru",
        shrink_after_s=AFTER_S, transform_after_s=LONGER_S, clock=clock,
    )  # fmt: skip
    found.set_formats(LevelFormats(("q8",)))
    found.set_transform(COST)
    yield found
    found.close()
    store.check_integrity(keys=True)


def nearly_spend(store: Store) -> None:
    store.writes.add("rows", int(SHARES["reencoded"] * BUDGET) + 1)


def talk(store: Store, tiers: Tiers, origin: Provenance = Provenance.EXACT) -> Node:
    """A chat of one turn that was used twice, whose rows are in RAM alone; its end."""
    ids = IDS[:N]
    node = store.commit_turn(Turn("local", "s", ids[:-20], ids[-20:], N, 1.0)).node
    store.touch(node)
    provenance = np.full(N, origin, np.uint8)
    for gap in tiers.gaps(ids, "local", provenance):
        tiers.accept(gap, coded_rows_of(gap.p1, gap.p0))
    return node


def formats(leaf: Node) -> list[tuple[int, str]]:
    runs = [] if leaf.file is None else leaf.file.runs
    return [(run.n_rows, run.format) for run in runs]


CODED = [(SINKS, NATIVE), (INNER, transform()), (TAIL, NATIVE)]
BLOCKS = [(SINKS, NATIVE), (INNER, "q8"), (TAIL, NATIVE)]


def test_rows_are_coded_at_once_and_written_once(store: Store, tiers: Tiers, clock: Clock) -> None:
    leaf = talk(store, tiers)
    nearly_spend(store)
    before = store.writes.today()["rows"]
    clock.now += 2 * AFTER_S
    until(lambda: formats(leaf) == CODED)
    written = store.writes.today()["rows"] - before
    assert leaf.file is not None
    assert written == leaf.file.nbytes < N * IDENTITY.layout.token_bytes / 2
    for node in leaf.path():
        store.rows.drop_hot(node)
    rows = coded_rows_of(N)
    inner = library_decodes(rows, SINKS, N - TAIL)
    assert same(planes_of(store, leaf, SINKS, N - TAIL), inner)
    assert same(planes_of(store, leaf, 0, SINKS), rows.slice(0, SINKS))
    assert same(planes_of(store, leaf, N - TAIL, N), rows.slice(N - TAIL, N))
    assert leaf.path()[0].worst_file == Provenance.APPROXIMATE
    clock.now += 2 * LONGER_S
    tiers.flush()
    assert store.writes.today()["reencoded"] == 0


def test_with_budget_left_they_take_the_ladder(store: Store, tiers: Tiers, clock: Clock) -> None:
    leaf = talk(store, tiers)
    clock.now += 2 * AFTER_S
    until(lambda: formats(leaf) == BLOCKS)


@pytest.mark.parametrize("why", ["no basis", "pinned"])
def test_others_take_block_formats(store: Store, tiers: Tiers, clock: Clock, why: str) -> None:
    """Without a basis there is nothing else; what is pinned is read too often."""
    leaf = talk(store, tiers)
    if why == "pinned":
        store.pins.add(leaf.id)
    else:
        tiers.set_transform(None)
    nearly_spend(store)
    clock.now += 2 * AFTER_S
    until(lambda: formats(leaf) != [])
    assert [name for _, name in formats(leaf)] == [NATIVE, "q8", NATIVE]


def test_a_request_makes_them_wait_and_nothing_is_coded_twice(
    store: Store, tiers: Tiers, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("towerd.tiers.writer.LOOK_S", 0.01)
    asked = 0

    def pause() -> None:
        nonlocal asked
        asked += 1
        if asked % 3 == 0:
            raise CodingInterrupted

    tiers.pause_transform(pause)
    leaf = talk(store, tiers)
    nearly_spend(store)
    clock.now += 2 * AFTER_S
    until(lambda: formats(leaf) == CODED)
    n_steps = -(-INNER // STEP_ROWS)
    assert n_steps < asked <= 1.5 * n_steps + 1
    for node in leaf.path():
        store.rows.drop_hot(node)
    inner = library_decodes(coded_rows_of(N), SINKS, N - TAIL)
    assert same(planes_of(store, leaf, SINKS, N - TAIL), inner)


def test_what_must_leave_or_end_waits_for_nothing(store: Store, tiers: Tiers, clock: Clock) -> None:
    """While requests run, and when the daemon ends: then in block formats."""

    def pause() -> None:
        raise CodingInterrupted

    tiers.pause_transform(pause)
    leaf = talk(store, tiers)
    nearly_spend(store)
    tiers.flush()
    assert formats(leaf) == BLOCKS


def test_moved_rows_stay_as_they_are(store: Store, tiers: Tiers, clock: Clock) -> None:
    """Whatever is left of the budget: until exact ones replace them."""
    leaf = talk(store, tiers, Provenance.AFTER_MOVED)
    assert leaf.hot is not None
    tiers.flush()
    assert {name for _, name in formats(leaf)} == {NATIVE}


def test_a_full_disk_is_not_tried_again_at_once(
    store: Store, tiers: Tiers, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks other work is done."""

    def write(*_: object, **__: object) -> None:
        raise DiskFull("The disk is full.")

    leaf = talk(store, tiers)
    monkeypatch.setattr(store.rows, "write", write)
    shrinker = Shrinker(store, AFTER_S, clock)
    writer = RowsWriter(store, TierCounters(), Provenance.APPROXIMATE, 0.0, clock, shrinker)
    writer.unwritten.add(leaf.id)
    assert writer.due_s() == 0
    with pytest.raises(DiskFull):
        writer.write_due()
    assert writer.due_s() > 0
    writer.write_due()
