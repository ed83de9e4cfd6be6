"""What the hot tier counts is what it takes: rows that leave are not kept alive by those that stay."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from format_oracle import plane_of
from store_tools import ROW_IDENTITY, check_rows, rows_of

from towerd.slots.layout import KVLayout
from towerd.store import Node, Store
from towerd.tiers.manager import Tiers

LAYOUT = KVLayout((plane_of("f16", 64),), (plane_of("f16", 64),))
TOKEN = LAYOUT.token_bytes
IDS = np.arange(200, dtype=np.int32)
HERE = "local"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", replace(ROW_IDENTITY, layout=LAYOUT)) as opened:
        yield opened


@pytest.fixture
def tiers(store: Store) -> Iterator[Tiers]:
    made = Tiers(store, LAYOUT, v_trans=False, hot_bytes=1 << 30, warm_bytes=1 << 30, policy="lru")
    yield made
    made.close()


def exported(store: Store, tiers: Tiers, ends: list[int]) -> tuple[list[Node], weakref.ref[object]]:
    """A path whose rows were exported together, and their buffer."""
    path = store.insert(IDS, HERE, ends)
    tiers.visited(path[-1], 1.0)
    rows = rows_of(IDS, 0, LAYOUT).copy()
    base = rows.k[0].base
    assert base is not None
    buffer: weakref.ref[object] = weakref.ref(base)
    del base
    (gap,) = tiers.gaps(IDS, HERE)
    tiers.accept(gap, rows)
    tiers.flush()
    return path, buffer


def evict(tiers: Tiers, n_tokens: int) -> None:
    """Down to so many tokens in RAM."""
    tiers.hot_bytes_max = n_tokens * TOKEN
    tiers.flush()
    assert tiers.store.state.hot_bytes == n_tokens * TOKEN
    gc.collect()


def test_little_is_left_of_what_was_exported_together(store: Store, tiers: Tiers) -> None:
    """It is copied once less than three quarters of it are used, and the rows are the same."""
    path, buffer = exported(store, tiers, [20, 50, 160, 200])
    evict(tiers, 160)
    assert buffer() is not None
    evict(tiers, 50)
    assert buffer() is None
    assert [node.hot is not None for node in path] == [True, True, False, False]
    assert check_rows(store, path[1]) == 50
    tiers.check_integrity()


def test_little_is_left_of_what_was_cut(store: Store, tiers: Tiers) -> None:
    """A beginning that others share does not keep alive what followed it once."""
    (leaf,), buffer = exported(store, tiers, [200])
    store.insert(IDS[:10], HERE, [10])
    evict(tiers, 10)
    assert leaf.hot is None
    assert buffer() is None
    tiers.check_integrity()


def test_a_pinned_base_stays(store: Store, tiers: Tiers, caplog: pytest.LogCaptureFixture) -> None:
    """The least recently used of all, and yet in RAM while it is pinned, beyond --hot-bytes, too; of
    pinned ones that do not fit into their own share some leave, and the log says so once."""
    pinned, other = np.arange(1000, 1060, dtype=np.int32), np.arange(2000, 2100, dtype=np.int32)
    for at, ids in enumerate((pinned, other, IDS)):
        end = store.insert(ids, HERE, [len(ids)])[-1]
        tiers.visited(end, float(at))
        (gap,) = tiers.gaps(ids, HERE)
        tiers.accept(gap, rows_of(ids, 0, LAYOUT).copy())
        tiers.flush()
        if ids is not other:
            store.pins.add(end.id)
    base, middle, last = (
        store.match(np.array([first], np.int32), HERE).nodes[0] for first in (1000, 2000, 0)
    )
    tiers.pinned_bytes_max = 260 * TOKEN
    tiers.hot_bytes_max = 30 * TOKEN
    tiers.flush()
    assert [node.hot is not None for node in (base, middle, last)] == [True, False, True]
    assert not caplog.records
    tiers.pinned_bytes_max = 0
    evict(tiers, 200)
    assert [node.hot is not None for node in (base, last)] == [False, True]
    assert ["do not fit into RAM" in record.message for record in caplog.records] == [True]
    store.pins.remove(last.id)
    evict(tiers, 0)
    tiers.check_integrity()
