"""When a prompt is looked up in the bucket, and when it is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from obstore.store import LocalStore
from store_tools import ROW_IDENTITY, make_hot, moved_rows_of, rows_of, write_all

from towerd.store import Store
from towerd.tiers.shared import fetcher as module
from towerd.tiers.shared import measured_speed
from towerd.tiers.shared.bucket import Bucket, open_bucket
from towerd.tiers.shared.fetcher import Fetcher
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Provenance

IDS = np.arange(1000, dtype=np.int32)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    with (
        Store.open(tmp_path / "one", ROW_IDENTITY) as one,
        Store.open(tmp_path / "two", ROW_IDENTITY) as two,
    ):
        yield one, two


def tier_of(store: Store, folder: Path) -> SharedTier:
    bucket = open_bucket(f"file://{folder}/bucket")
    return SharedTier(store, bucket, bytes(32), "near", has_rows=True)


async def test_what_is_recorded_without_rows_is_looked_up(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    """Rows that did not come when the chat was taken come later; what a request left live is not looked up."""
    one, two = stores
    write_all(one, one.insert(IDS, "local", [1000])[-1])
    tier_of(one, tmp_path).put_path(IDS, "local")
    two.insert(IDS, "local", [1000])
    shared = tier_of(two, tmp_path)
    fetcher = Fetcher(shared)
    fetcher.evaluated(64, 64.0)
    fetcher.has_run(IDS, "other")
    await fetcher.before(IDS, "local", two.deletions.watch())
    assert shared.n_stored(IDS, "local") == 1000
    assert fetcher.stats()["lookups"] == 1
    fetcher.has_run(IDS + 5000, "local")
    await fetcher.before(IDS + 5000, "local", two.deletions.watch())
    assert fetcher.stats()["lookups"] == 1
    await fetcher.close()


async def test_a_fork_is_no_damage(stores: tuple[Store, Store], tmp_path: Path) -> None:
    """The mark of a base has the objects of the chat that was put with it, too: another chat takes the base alone."""
    one, two = stores
    write_all(one, one.insert(IDS, "local", [300])[-1])
    chat = one.insert(IDS, "local", [300, 1000])[-1]
    make_hot(one, chat)
    one.rows.write([chat])
    tier_of(one, tmp_path).put_path(IDS, "local")
    prompt = IDS.copy()
    prompt[300:] += 5000
    shared = tier_of(two, tmp_path)
    fetcher = Fetcher(shared)
    fetcher.evaluated(64, 64.0)
    await fetcher.before(prompt, "local", two.deletions.watch())
    await fetcher.close()
    assert shared.n_stored(prompt, "local") == 300
    assert shared.counters.damaged == shared.counters.missing == 0


async def test_a_measure_of_the_bucket_is_not_for_ever(
    stores: tuple[Store, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow bucket is not asked for rows; ten minutes later it is again. Any long fetch is a measure."""
    one, two = stores
    put = []
    for start in (0, 5000):
        ids = IDS + start
        write_all(one, one.insert(ids, "local", [1000])[-1])
        put.append(tier_of(one, tmp_path).put_path(ids, "local"))
    shared = tier_of(two, tmp_path)
    monkeypatch.setattr("towerd.tiers.shared.measured_speed.MEASURED_BYTES_MIN", 1 << 16)
    shared.fetch_path(put[0], IDS, "local")
    assert shared.bytes_per_s() > 0
    fetcher = Fetcher(shared)
    fetcher.evaluated(10**9, 1e-3)

    async def ask() -> int:
        await fetcher.before(IDS + 5000, "local", two.deletions.watch())
        return shared.n_stored(IDS + 5000, "local")

    await ask()
    await fetcher.close()
    assert shared.n_stored(IDS + 5000, "local") == 0
    fetcher = Fetcher(shared)
    monkeypatch.setattr(measured_speed, "MEASURE_S", 0.0)
    fetcher.evaluated(10**9, 1e-3)
    await ask()
    await fetcher.close()  # the request did not wait for it
    assert shared.n_stored(IDS + 5000, "local") == 1000


class SlowBucket(Bucket):
    """Answers when it may."""

    may = threading.Event()

    def has(self, place: str) -> bool:
        assert self.may.wait(60)
        return super().has(place)


async def test_a_bucket_that_is_slow_each_time_is_asked_ever_less(
    stores: tuple[Store, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long evaluation takes, a prompt waits for a moment until something is found; it answers well, but late."""
    clock, runs = [0.0], []

    class Pool(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
            runs.append(super().submit(*args, **kwargs))
            return runs[-1]

    monkeypatch.setattr(module, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(module, "FIND_S_MAX", 0.01)
    bucket = SlowBucket(LocalStore(tmp_path / "bucket", mkdir=True))
    store = stores[1]
    fetcher = Fetcher(SharedTier(store, bucket, bytes(32), "near", has_rows=True))
    fetcher.evaluated(64, 640.0)
    asked = []
    for now in range(0, 200, 5):
        clock[0] = float(now)
        n_before = fetcher.stats()["lookups"]
        bucket.may.clear()
        await fetcher.before(IDS, "local", store.deletions.watch())
        if fetcher.stats()["lookups"] > n_before:
            asked.append(now)
        bucket.may.set()
        for run in runs:
            await asyncio.wrap_future(run)
    assert asked == [0, 10, 30, 70, 150]
    await fetcher.close()


async def test_what_cannot_be_kept_is_not_fetched(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    """Moved rows stay where they are, though they do not count for this prompt."""
    one, two = stores
    write_all(one, one.insert(IDS, "local", [1000])[-1])
    tier_of(one, tmp_path).put_path(IDS, "local")
    node = two.insert(IDS, "local", [1000])[-1]
    two.rows.attach_hot(node.path(), moved_rows_of(IDS), origin=Provenance.AFTER_MOVED)
    shared = tier_of(two, tmp_path)
    fetcher = Fetcher(shared)
    fetcher.evaluated(64, 640.0)
    await fetcher.before(IDS, "local", two.deletions.watch())
    await fetcher.close()
    assert shared.counters.fetched == 0
    assert shared.n_stored(IDS, "local") == 0


def test_one_segment_here_and_several_files_there(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    one, two = stores
    for n in (300, 600, 1000):
        node = one.insert(IDS[:n], "local", [n])[-1]
        one.rows.attach_hot([node], rows_of(node.prefix_ids(), node.p0))
        one.rows.write([node])
    found = tier_of(one, tmp_path).put_path(IDS, "local")
    assert [place.p0 for place in found.rows] == [0, 300, 600]
    two.insert(IDS, "local", [1000])
    shared = tier_of(two, tmp_path)
    shared.fetch_path(found, IDS, "local")
    assert shared.n_stored(IDS, "local") == 1000
