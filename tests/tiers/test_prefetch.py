"""Prefetch: rows expected back are copied into free memory, slowly, and are evicted first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from format_oracle import plane_of
from seams import hot_policy
from store_tools import ROW_IDENTITY, rows_of

from towerd.policy import Policy, Tree
from towerd.policy.base import LRU
from towerd.slots.layout import KVLayout
from towerd.store import Node, Store
from towerd.tiers.manager import Tiers

LAYOUT = KVLayout((plane_of("f16", 64),), (plane_of("f16", 64),))
TOKEN = LAYOUT.token_bytes


class Seer(LRU):
    """LRU that was told what will be wanted."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self.said: list[int] = []

    def wanted(self, now: float, most: int) -> list[tuple[int, float]]:
        return [(key, 1.0 / (1 + i)) for i, key in enumerate(self.said[:most])]


class Bench:
    """Tiers of which 100 tokens fit into RAM, with 10 chats of 20 tokens on disk."""

    def __init__(
        self, root: Path, bytes_per_s: int, policy: Callable[[Tree], Policy] = Seer
    ) -> None:
        self.now = 100.0
        self.store = Store.open(root, replace(ROW_IDENTITY, layout=LAYOUT), clock=lambda: self.now)
        with hot_policy(policy) as made:
            self.tiers = Tiers(
                self.store,
                LAYOUT,
                v_trans=False,
                hot_bytes=100 * TOKEN,
                warm_bytes=1 << 40,
                policy="lru",
                fidelity="exact",
                prefetch_bytes=bytes_per_s,
                clock=lambda: self.now,
            )
        self.seer = made[0]
        self.prefetcher = self.tiers.prefetcher
        self.prefetcher.start(lambda: True)
        self._step = self.prefetcher.step
        # the tier thread takes no steps of its own here
        self.prefetcher.step = lambda room: None  # type: ignore[method-assign]
        self.ends = [self.chat(i) for i in range(10)]
        self.tiers.flush()
        self.step(0.0)  # bandwidth accrues from here on

    def chat(self, number: int) -> Node:
        ids = np.arange(20, dtype=np.int32) + 100 * number
        end = self.store.insert(ids, "local", [20])[-1]
        self.visit(end)
        for gap in self.tiers.gaps(ids, "local"):
            self.tiers.accept(gap, rows_of(ids, 0, LAYOUT))
        return end

    def visit(self, end: Node) -> None:
        self.now += 1.0
        self.tiers.visited(end, self.now)

    def drop(self, *ends: Node) -> None:
        """Out of RAM, as eviction does it."""
        for end in ends:
            self.tiers.evictor.drop_hot(end.id)

    def step(self, seconds: float = 1.0) -> list[int]:
        """One step after so long; which chats are in RAM then."""
        self.now += seconds
        self._step(self.tiers.hot_bytes_max - self.store.state.hot_bytes)
        return [i for i, end in enumerate(self.ends) if end.hot is not None]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "s", 1 << 30)
    yield bench
    bench.tiers.close()
    bench.store.check_integrity(keys=True)
    bench.store.close()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "s", 25 * TOKEN)
    yield bench
    bench.tiers.close()
    bench.store.close()


def test_only_into_free_room(full: Bench) -> None:
    """Nothing that is there leaves for what may come; the soonest wanted come first."""
    assert full.step() == [5, 6, 7, 8, 9]
    full.seer.said = [end.id for end in full.ends[:5]]
    assert full.step() == [5, 6, 7, 8, 9]
    full.drop(full.ends[7], full.ends[8])
    assert full.step() == [0, 1, 5, 6, 9]
    assert full.tiers.stats()["segments_prefetched"] == 2


def test_unused_ones_go_first_and_teach_nothing(full: Bench) -> None:
    """A policy never hears of them; when room is needed they leave before anything else."""
    full.drop(*full.ends[7:])
    full.seer.said = [full.ends[0].id, full.ends[1].id]
    assert full.step() == [0, 1, 5, 6]
    assert full.ends[0].id not in full.seer
    used = full.seer.explain(full.ends[5].id, 0.0)["used"]
    full.visit(full.ends[1])
    assert full.ends[1].id in full.seer
    full.tiers.hot_bytes_max = 60 * TOKEN
    full.tiers.flush()
    assert full.step() == [1, 5, 6]
    assert full.seer.explain(full.ends[5].id, 0.0)["used"] == used
    assert full.tiers.stats()["segments_prefetched_used"] == 1
    assert full.store.state.hot_bytes == full.seer.nbytes


def test_bandwidth(slow: Bench) -> None:
    """25 tokens a second, two seconds' worth at once at most."""
    slow.drop(*slow.ends)
    slow.seer.said = [end.id for end in slow.ends[:4]]
    assert slow.step(0.1) == []
    assert slow.step(0.9) == [0]
    assert slow.step(0.5) == [0]
    assert slow.step(100.0) == [0, 1, 2]


def test_not_while_prompts_are_evaluated(full: Bench) -> None:
    full.drop(*full.ends)
    full.seer.said = [full.ends[3].id]
    full.prefetcher.start(lambda: False)
    assert full.step() == []
    full.prefetcher.start(lambda: True)
    assert full.step() == [3]


def test_what_has_no_rows_is_handed_on(full: Bench) -> None:
    """Something that is expected back and cold can be thawed ahead."""
    end = full.ends[2]
    full.drop(end)
    assert end.file is not None
    full.store.rows.drop_file(end.file)
    asked: list[int] = []
    full.prefetcher.start(lambda: True, asked.append)
    full.seer.said = [end.id]
    assert 2 not in full.step()
    assert asked == [end.id]


def test_gone_and_unknown_segments(full: Bench) -> None:
    """A prediction may be about what was removed long ago."""
    full.drop(*full.ends)
    full.seer.said = [10**9, full.ends[1].id]
    assert full.step() == [1]
    full.store.gc()
    assert full.store.nodes() == []
    assert full.prefetcher.give_back(1) == 0


def test_off_without_bandwidth_or_foresight(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "s", 0)
    bench.seer.said = [bench.ends[0].id]
    assert bench.step() == [5, 6, 7, 8, 9]
    assert bench.prefetcher.wait_s() == float("inf")
    plain = Bench(tmp_path / "plain", 1 << 30, LRU)
    assert not plain.tiers.ranking.predicts_reuse
    assert plain.tiers.ranking.wanted(5) == []
    assert plain.prefetcher.wait_s() == float("inf")
    for each in (bench, plain):
        each.tiers.close()
        each.store.close()
