"""Parts of rows are fetched side by side, and used before they are durable: what may go wrong meanwhile costs no answer."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from obstore.store import LocalStore
from store_tools import ROW_IDENTITY, check_rows, write_all
from waiting import until, until_async

from towerd.errors import RowsDamaged
from towerd.store import Store
from towerd.tiers.shared import objects
from towerd.tiers.shared.bucket import Bucket
from towerd.tiers.shared.fetcher import Fetcher
from towerd.tiers.shared.objects import AHEAD_PARTS
from towerd.tiers.shared.tier import SharedTier

IDS = np.arange(600, dtype=np.int32)


class GatedBucket(Bucket):
    """Counts the parts that are asked for at once, and gives them when it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LocalStore(folder, mkdir=True))
        self.may = threading.Event()
        self.n_asked = self.n_now = self.n_most = 0
        self._counting = threading.Lock()

    def get(self, place: str, bytes_max: int) -> memoryview:
        if not place.startswith("objects/"):
            return super().get(place, bytes_max)
        with self._counting:
            self.n_asked += 1
            self.n_now += 1
            self.n_most = max(self.n_most, self.n_now)
        try:
            assert self.may.wait(60)
            return super().get(place, bytes_max)
        finally:
            with self._counting:
                self.n_now -= 1


@dataclass(frozen=True, slots=True)
class World:
    """A chat in a bucket, in many parts, and an empty store of another machine."""

    store: Store
    bucket: GatedBucket
    tier: SharedTier
    parts: list[Path]

    def n_arrived(self) -> int:
        """The tokens with rows on the other machine, each of which is compared."""
        match = self.store.match(IDS, "local")
        n = self.tier.n_stored(IDS, "local")
        assert not n or check_rows(self.store, match.nodes[-1]) == n
        return n

    async def ask(self, fetcher: Fetcher) -> None:
        """What a prompt does before it is evaluated."""
        await fetcher.before(IDS, "local", self.store.deletions.watch())


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    folder = tmp_path / "bucket"
    monkeypatch.setattr(objects, "PART_BYTES", 1 << 13)
    with Store.open(tmp_path / "one", ROW_IDENTITY) as one:
        write_all(one, one.insert(IDS, "local", [600])[-1])
        bucket = Bucket(LocalStore(folder, mkdir=True))
        SharedTier(one, bucket, bytes(32), "near", has_rows=True).put_path(IDS, "local")
    with Store.open(tmp_path / "two", ROW_IDENTITY) as two:
        gated = GatedBucket(folder)
        tier = SharedTier(two, gated, bytes(32), "near", has_rows=True)
        parts = sorted((folder / "objects").glob("*/*"))
        assert len(parts) > 2 * AHEAD_PARTS
        yield World(two, gated, tier, parts)
        two.check_integrity(keys=True)
        assert not list((tmp_path / "two" / "tmp").iterdir())


def patient(world: World) -> Fetcher:
    """A fetcher whose prompts have time enough to wait."""
    fetcher = Fetcher(world.tier)
    fetcher.evaluated(64, 640.0)
    return fetcher


async def test_some_are_fetched_at_once(world: World) -> None:
    """As many as are allowed, and no more; another prompt does not wait for them, and is not looked up."""
    fetcher = patient(world)
    first = asyncio.create_task(world.ask(fetcher))
    await until_async(lambda: world.bucket.n_now == AHEAD_PARTS)
    await world.ask(fetcher)
    assert not first.done()
    assert fetcher.stats()["lookups"] == 1
    assert world.n_arrived() == 0
    world.bucket.may.set()
    await first
    assert (world.bucket.n_most, world.bucket.n_asked) == (AHEAD_PARTS, len(world.parts))
    assert world.n_arrived() == len(IDS)
    await fetcher.close()


@pytest.mark.parametrize("number", [1, 6, -1])
@pytest.mark.parametrize("kind", ["flip", "cut", "gone"])
async def test_a_part_is_bad(world: World, number: int, kind: str) -> None:
    """Those before it were written already: nothing of them is used, nor stays."""
    world.bucket.may.set()
    part = world.parts[number]
    data = part.read_bytes()
    part.unlink()
    if kind != "gone":
        part.write_bytes(data[:-1] + (bytes([data[-1] ^ 1]) if kind == "flip" else b""))
    fetcher = patient(world)
    await world.ask(fetcher)
    await fetcher.close()
    assert world.n_arrived() == 0
    assert world.tier.counters.damaged + world.tier.counters.missing == 1
    assert fetcher.stats()["lookups_late"] == 0
    part.unlink(missing_ok=True)
    part.write_bytes(data)
    fetcher = patient(world)
    await world.ask(fetcher)
    await fetcher.close()
    assert world.n_arrived() == len(IDS)


async def test_a_prompt_is_cancelled_meanwhile(world: World) -> None:
    """What was begun comes, for the next prompt."""
    fetcher = patient(world)
    first = asyncio.create_task(world.ask(fetcher))
    await until_async(lambda: world.bucket.n_now == AHEAD_PARTS)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    world.bucket.may.set()
    await until_async(lambda: world.tier.n_stored(IDS, "local") > 0)
    assert world.n_arrived() == len(IDS)
    await fetcher.close()


async def test_the_daemon_ends_meanwhile(world: World) -> None:
    """It waits for nothing, and leaves nothing half done."""
    fetcher = patient(world)
    first = asyncio.create_task(world.ask(fetcher))
    await until_async(lambda: world.bucket.n_now == AHEAD_PARTS)
    world.bucket.close()
    world.bucket.may.set()
    await fetcher.close()
    await first
    assert world.n_arrived() == 0
    assert world.tier.counters.errors == 1
    until(lambda: world.bucket.n_now == 0)
    assert world.bucket.n_asked <= 2 * AHEAD_PARTS


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("lose", [zeros, half, Path.unlink])
async def test_a_power_cut_before_rows_are_durable(
    world: World, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    """The catalog may then name a file whose content never came to the disk: none of it is used, and it is
    fetched again."""
    world.bucket.may.set()
    found = world.tier.find(IDS, "local", 0)
    assert found is not None
    root = tmp_path / "third"
    with Store.open(root, ROW_IDENTITY) as store:
        tier = SharedTier(store, world.bucket, bytes(32), "near", has_rows=True)
        tier.fetch_path(found.put, IDS, "local", is_durable=False)
        assert tier.n_stored(IDS, "local") == len(IDS)
    (file,) = (root / "segments").iterdir()
    lose(file)
    with Store.open(root, ROW_IDENTITY) as store:
        tier = SharedTier(store, world.bucket, bytes(32), "near", has_rows=True)
        match = store.match(IDS, "local")
        for part in store.plan_rows(match, 0, len(IDS)):
            with pytest.raises(RowsDamaged):
                store.rows.load(part)
        assert tier.n_stored(IDS, "local") == 0
        tier.fetch_path(found.put, IDS, "local", is_durable=False)
        tier.settle()
        assert check_rows(store, store.match(IDS, "local").nodes[-1]) == len(IDS)
        store.check_integrity(keys=True)
