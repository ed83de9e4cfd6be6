"""Prefetch: one likely step at a time, within a bandwidth, and none while too much was wasted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from format_oracle import plane_of
from store_tools import ROW_IDENTITY, rows_of

from towerd.slots.layout import KVLayout
from towerd.store import Node, Store
from towerd.tiers.manager import Tiers
from towerd.tiers.prefetch import Prefetch

LAYOUT = KVLayout((plane_of("f16", 64),), (plane_of("f16", 64),))
TOKEN = LAYOUT.token_bytes
N = 20


class Bench:
    """Tiers with workflows of agents whose prompts have 20 tokens, and what is asked for ahead."""

    def __init__(self, root: Path, policy: str = "pbkv", bytes_per_s: int = 1 << 30) -> None:
        self.now = 100.0
        self.store = Store.open(root, replace(ROW_IDENTITY, layout=LAYOUT), clock=lambda: self.now)
        self.tiers = Tiers(
            self.store,
            LAYOUT,
            v_trans=False,
            hot_bytes=1 << 30,
            warm_bytes=1 << 40,
            policy=policy,
            fidelity="exact",
            prefetch_bytes=bytes_per_s,
            clock=lambda: self.now,
        )
        self.asked: list[Prefetch] = []
        self.cold: list[int] = []
        self.prefetcher = self.tiers.prefetcher
        self.prefetcher.start(self.asked.append, lambda: True, self.cold.append)
        self._step = self.prefetcher.step
        # the tier thread takes no steps of its own here
        self.prefetcher.step = lambda has_rows: None  # type: ignore[method-assign]

    def close(self) -> None:
        self.tiers.close()
        self.store.close()

    def node(self, first: int, n: int = N, reply: int = 4) -> Node:
        """The end of a tower of `n` tokens of a prompt and some of a reply."""
        ids = np.arange(n + reply, dtype=np.int32) + first
        return self.store.insert(ids, "local", [n, n + reply])[-1]

    def says(self, workflow: str, agent: str, end: Node) -> None:
        """A step of a workflow, and what is asked for after it."""
        self.now += 1.0
        self.tiers.visited(end, self.now)
        self.tiers.ranking.stepped(end, workflow, agent)
        self.look()

    def look(self) -> None:
        nodes = self.store.state.tree.nodes
        self._step(lambda key: key in nodes and nodes[key].has_rows)

    def rounds(self, workflow: str, n: int) -> None:
        """Three agents in turn; all their prefetches are used."""
        for i in range(n):
            for k, agent in enumerate("abc"):
                for made in self.asked:
                    self.prefetcher.used(made)
                self.says(workflow, agent, self.node(1000 * k, N + 8 * i))
                self.bring()

    def bring(self, tokens: int = N) -> None:
        """What is asked for comes, once."""
        for made in self.asked:
            if not made.nbytes:
                self.prefetcher.brought(made, tokens * TOKEN)

    def tower(self, made: Prefetch) -> list[int]:
        ids: list[int] = self.store.node(made.step.end).prefix_ids().tolist()
        return ids


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "s")
    yield made
    made.close()


def test_the_next_agents_prompt(bench: Bench) -> None:
    """After a round the next agent is known; what its prompt kept last time is asked for, once."""
    ends = {agent: bench.node(1000 * k) for k, agent in enumerate("abc")}
    for agent in "abca":
        bench.says("w", agent, ends[agent])
    (made,) = bench.asked
    assert (made.step.workflow, made.step.n_steps, made.step.chance >= 0.5) == ("w", 4, True)
    assert made.step.last == ends["b"].id
    assert bench.tower(made) == list(range(1000, 1000 + N)), "its prompt, without the reply"
    bench.look()
    assert len(bench.asked) == 1
    # b continues from its whole tower, and a third time it is expected to
    longer = bench.node(1000, N + 4, 6)
    bench.says("w", "b", longer)
    bench.says("w", "c", ends["c"])
    bench.says("w", "a", ends["a"])
    assert [each.step.last for each in bench.asked[1:]] == [ends["c"].id, ends["a"].id, longer.id]
    assert bench.tower(bench.asked[-1]) == list(range(1000, 1000 + N + 10))


def test_a_base_with_another_task_each_time(bench: Bench) -> None:
    """Only what two prompts of an agent have in common is expected to stay."""

    def asks(first: int, task: int) -> Node:
        base = np.arange(12, dtype=np.int32) + first
        ids = np.concatenate([base, np.arange(10, dtype=np.int32) + task])
        return bench.store.insert(ids, "local", [len(ids) - 2, len(ids)])[-1]

    for i in range(3):
        bench.says("w", "a", asks(0, 5000 + 100 * i))
        bench.says("w", "b", asks(1000, 6000 + 100 * i))
    bench.says("w", "a", asks(0, 7000))
    assert bench.tower(bench.asked[-1]) == list(range(1000, 1012))


def test_the_first_prompt_in_a_workflow(bench: Bench) -> None:
    """An agent's base is known from other workflows of the same tenant, after two of them."""

    def asks(first: int, task: int) -> Node:
        ids = np.concatenate([np.arange(12) + first, np.arange(10) + task]).astype(np.int32)
        return bench.store.insert(ids, "local", [len(ids) - 2, len(ids)])[-1]

    bench.says("u", "a", asks(0, 5000))
    bench.says("u", "b", asks(1000, 5100))
    bench.says("v", "a", asks(0, 5200))
    assert bench.asked == []
    bench.says("v", "b", asks(1000, 5300))
    bench.says("w", "a", asks(0, 5400))
    (made,) = bench.asked
    assert made.step.workflow == "w"
    assert bench.tower(made) == list(range(1000, 1012))


def test_the_wrong_ones_are_bounded(bench: Bench) -> None:
    """A workflow that does something else each time: nothing more until it is a twentieth."""
    ends = {agent: bench.node(1000 * k) for k, agent in enumerate("abcx")}
    bench.prefetcher.moved("", 100 * N * TOKEN)
    for agent in "abcabca":
        bench.says("w", agent, ends[agent])
        bench.bring()
    before = len(bench.asked)
    bench.says("w", "x", ends["x"])
    stats = bench.tiers.stats()
    wasted = stats["prefetched_bytes_wasted"]
    assert wasted == before * N * TOKEN
    assert stats["prefetched_bytes"] - wasted <= N * TOKEN
    bench.prefetcher.brought(bench.asked[0], 5 * N * TOKEN)
    assert bench.tiers.stats()["prefetch_stopped"] == 1
    n_asked = len(bench.asked)
    for agent in "abcabca":
        bench.says("w", agent, ends[agent])
    assert len(bench.asked) == n_asked
    bench.prefetcher.moved("", 1000 * N * TOKEN)
    bench.says("w", "b", ends["b"])
    assert len(bench.asked) == n_asked + 1
    # what was used later than expected is not wasted after all
    bench.prefetcher.used(bench.asked[0], 0.5)
    assert bench.tiers.stats()["prefetched_bytes_wasted"] == wasted + 2 * N * TOKEN


def test_more_at_once_after_each_that_was_right(bench: Bench) -> None:
    """One workflow after the other has a prefetch at first."""
    for name in ("u", "v"):
        for agent, first in zip("abca", (0, 1000, 2000, 0), strict=True):
            bench.says(name, agent, bench.node(first))
    assert [made.step.workflow for made in bench.asked] == ["u"]
    bench.rounds("u", 2)
    bench.says("v", "b", bench.node(1000))
    assert {made.step.workflow for made in bench.asked if not made.is_over} == {"u", "v"}
    bench.tiers.ranking.workflow_ended("u")
    bench.look()
    assert {made.step.workflow for made in bench.asked if not made.is_over} == {"v"}


def test_workflows_that_stop_hold_up_their_own_tenant_alone(bench: Bench) -> None:
    """Twenty that nobody ends, of another tenant; of its own what brings nothing holds up nobody."""
    ends = {agent: bench.node(1000 * k) for k, agent in enumerate("abc")}
    for i in range(20):
        for agent in "abca":
            bench.says(f"other\n{i}", f"other\n{agent}", ends[agent])
    assert len(bench.asked) == 1
    for agent in "abca":
        bench.says("me\nw", f"me\n{agent}", ends[agent])
    assert [made.tenant for made in bench.asked] == ["other", "me"]
    bench.asked[0].is_done = True
    bench.look()
    assert [made.tenant for made in bench.asked] == ["other", "me", "other"]


def test_bandwidth(tmp_path: Path) -> None:
    """What was brought beyond it is waited for."""
    bench = Bench(tmp_path / "s", bytes_per_s=5 * TOKEN)
    bench.prefetcher.moved("", 1 << 30)
    ends = {agent: bench.node(1000 * k) for k, agent in enumerate("abc")}
    for agent in "abca":
        bench.says("w", agent, ends[agent])
    assert len(bench.asked) == 1
    bench.bring(20)
    bench.says("w", "b", ends["b"])
    assert len(bench.asked) == 1, "10 tokens at first, 5 more since, 20 spent"
    bench.now += 2.5
    bench.look()
    assert len(bench.asked) == 2
    bench.close()


def test_foresight_forecasts_steps_before_it_trusts_returns(tmp_path: Path) -> None:
    """It does once its predictor was right often enough."""
    bench = Bench(tmp_path / "s", "foresight")
    bench.rounds("w", 4)
    assert [made.step.chance > 0.5 for made in bench.asked[-3:]] == [True] * 3
    assert bench.tiers.ranking.wanted(10) == []
    stats = bench.tiers.stats()
    assert stats["prefetched_bytes_wasted"] == stats["prefetches_wrong"] == 0
    assert stats["prefetches_right"] == len(bench.asked) - 1
    bench.close()


def test_off_without_bandwidth_or_workflows(tmp_path: Path) -> None:
    for name, policy, bytes_per_s in (("a", "pbkv", 0), ("b", "lru", 1 << 30)):
        bench = Bench(tmp_path / name, policy, bytes_per_s)
        for agent in "abcabca":
            bench.says("w", agent, bench.node(1000 * "abc".index(agent)))
        assert bench.asked == []
        assert bench.prefetcher.wait_s() == float("inf")
        bench.close()


def test_what_has_no_rows_is_handed_on(bench: Bench) -> None:
    """Something that is expected back and cold can be thawed ahead."""
    ends = {agent: bench.node(1000 * k) for k, agent in enumerate("abc")}
    ids = ends["b"].prefix_ids()
    for gap in bench.tiers.gaps(ids, "local"):
        bench.tiers.accept(gap, rows_of(ids[: gap.p1], gap.p0, LAYOUT))
    bench.tiers.flush()
    for agent in "abca":
        bench.now += 10.0
        bench.says("w", agent, ends[agent])
    assert ends["b"].id not in bench.cold
    assert ends["a"].id in bench.cold
