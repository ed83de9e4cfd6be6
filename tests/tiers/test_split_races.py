"""Segments are split while their rows are on the way: nothing is left out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from store_tools import LAYOUT, ROW_IDENTITY, rows_of

from towerd.store import Store
from towerd.tiers.manager import Tiers

N = 200
ROUNDS = 6
PLACES = tuple(range(5, 60, 5))


@pytest.fixture
def busy_interpreter() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", ROW_IDENTITY) as opened:
        yield opened


@pytest.fixture
def tiers(store: Store) -> Iterator[Tiers]:
    made = Tiers(store, LAYOUT, v_trans=False, hot_bytes=1 << 30, warm_bytes=1 << 30, policy="lru")
    yield made
    made.close()


def conversation(number: int) -> npt.NDArray[np.int32]:
    return np.arange(1000 * number + 1, 1000 * number + N + 1, dtype=np.int32)


def split_meanwhile(store: Store, ids: npt.NDArray[np.int32], *at: int) -> threading.Thread:
    """Cut the conversation's segment at these places, from another thread."""

    def work() -> None:
        for end in at:
            store.insert(ids[:end], "local", [end])

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.usefixtures("busy_interpreter")
def test_rows_reach_both_parts_of_a_split_segment(store: Store, tiers: Tiers) -> None:
    for number in range(ROUNDS):
        ids = conversation(number)
        store.insert(ids, "local", [60, *range(61, N + 1)])  # many: it takes a while to look
        splitting = split_meanwhile(store, ids, *PLACES)
        while splitting.is_alive():
            gaps = tiers.gaps(ids, "local")
            assert [(gap.p0, gap.p1) for gap in gaps] == [(0, N)]
        gaps = tiers.gaps(ids, "local")
        splitting = split_meanwhile(store, ids, 3)
        for gap in gaps:
            tiers.accept(gap, rows_of(ids[: gap.p1], gap.p0))
        splitting.join()
        assert [node for node in store.match(ids, "local").nodes if node.hot is None] == []
        tiers.check_integrity()
    tiers.flush()
    tiers.check_integrity()


@pytest.mark.usefixtures("busy_interpreter")
def test_a_plan_has_no_holes(store: Store, tiers: Tiers) -> None:
    for number in range(ROUNDS):
        ids = conversation(number)
        (node,) = store.insert(ids, "local", [N])
        store.rows.attach_hot([node], rows_of(ids))
        splitting = split_meanwhile(store, ids, *PLACES)
        while splitting.is_alive():
            plan = tiers.plan(tiers.store.hold(ids, "local"), 0)
            at = 0
            for _, rows in tiers.rows(plan):
                assert rows.p0 == at
                at = rows.p1
            assert at == plan.n == N
        tiers.check_integrity()
