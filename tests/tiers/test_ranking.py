"""The daemon's tiers and the replayer decide alike; rows that come late change no order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from format_oracle import plane_of
from store_tools import ROW_IDENTITY, rows_of

from lab.replay.load import load
from lab.replay.simulate import replay
from lab.replay.trace import Trace
from towerd.policy import NAMES, make_policy
from towerd.sessions.trace_recorder import TraceRecorder
from towerd.slots.layout import KVLayout
from towerd.store import FormatRequest, Node, SegmentFile, Store, Turn
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import Gap
from towerd.tiers.ranking import Ranking
from towerd.tokens import Ids

LAYOUT = KVLayout((plane_of("f16", 64),), (plane_of("f16", 64),))
NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Ask:
    """One request of a made-up day."""

    t: float
    session: str
    ids: Ids
    stop: str
    service_s: float
    agent: str | None = None


def a_day(seed: int, n: int = 110) -> list[Ask]:
    """A shared system prompt, then chats that take turns; some pause, some return at once."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 500, 20).astype(np.int32)
    asks = [Ask(1.0, "base", base, "end_turn", 0.5)]
    chats: list[Ids] = []
    t = 10.0
    for _ in range(n):
        if not chats or rng.random() < 0.15:
            chats.append(base)
        at = int(len(chats) * rng.random() ** 2) if rng.random() < 0.7 else len(chats) - 1
        said = rng.integers(500 + 50 * at, 550 + 50 * at, int(rng.integers(3, 25)))
        chats[at] = np.concatenate([chats[at], said.astype(np.int32)])
        stop = str(rng.choice(["tool_use", "end_turn"]))
        agent = str(rng.choice(["plan", "code", "test"]))
        asks.append(Ask(t, str(at), chats[at], stop, 0.5, agent))
        t += float(rng.choice([2.0, 5.0, 90.0]))
    return asks


class Daemon:
    """Store and tiers with a clock set by hand, and the rows that left RAM."""

    def __init__(self, root: Path, policy: str, hot_tokens: int, layout: KVLayout = LAYOUT) -> None:
        self.now = 0.0
        self.layout = layout
        self.hot_bytes = hot_tokens * layout.token_bytes
        self.store = Store.open(root, replace(ROW_IDENTITY, layout=layout), clock=lambda: self.now)
        self.tiers = Tiers(
            self.store, layout, v_trans=False, hot_bytes=1 << 40, warm_bytes=1 << 40,
            policy=policy, fidelity="exact", clock=lambda: self.now,
        )  # fmt: skip
        self.left: list[tuple[int, ...]] = []
        real = self.tiers.ranking.hot_victims

        def watch(bytes_needed: int, is_evictable: Callable[[int], bool]) -> list[int]:
            found = real(bytes_needed, is_evictable)
            self.left += [tuple(self.store.node(key).prefix_ids().tolist()) for key in found]
            return found

        self.tiers.ranking.hot_victims = watch  # type: ignore[method-assign]

    def serve(self, ask: Ask) -> Node:
        """What a request makes the engine and the session do, one thing after the other."""
        self.now = ask.t
        for _ in self.tiers.rows(self.tiers.plan(self.tiers.store.hold(ask.ids, "local"), 0)):
            pass
        self.tiers.hot_bytes_max = 1 << 40
        end = self.store.insert(ask.ids, "local", [len(ask.ids)])[-1]
        self.tiers.visited(end, ask.t)
        if ask.agent is not None:
            self.tiers.ranking.stepped(end, ask.session, ask.agent)
        for gap in self.tiers.gaps(ask.ids, "local"):
            for node in gap.nodes:  # each has a file of its own
                rows = rows_of(ask.ids[: node.p1], node.p0, self.layout)
                self.tiers.accept(Gap((node,), node.p0, node.p1), rows)
                self.tiers.flush()
        self.tiers.flush()
        assert all(node.hot is not None for node in end.path())
        self.tiers.hot_bytes_max = self.hot_bytes
        self.tiers.flush()
        self._enforce_disk()
        self.now = ask.t + ask.service_s
        self.tiers.ranking.answered(end, self.now, ask.stop)
        return end

    def _enforce_disk(self) -> None:
        """For a test of the disk tier."""

    def close(self) -> None:
        self.tiers.close()
        self.store.close()


def recorded(path: Path, asks: list[Ask]) -> Path:
    """The day as the daemon records it, a block a token."""
    meta: dict[str, str] = {}
    trace = TraceRecorder.open(path, meta.get, meta.__setitem__, 0.0, block_tokens=1)
    for ask in asks:
        turn = Turn(
            "local",
            ask.session,
            ask.ids,
            NOTHING,
            len(ask.ids),
            ask.t,
            stop=ask.stop,
            workflow=ask.session,
            agent=ask.agent,
        )
        trace.add(turn, ask.session, ask.t + ask.service_s)
    trace.close()
    return path


class Watched:
    """A policy, and what the replayer took out of it."""

    def __init__(self, name: str, trace: Trace) -> None:
        self.policy = make_policy(name, trace)
        self.left: list[int] = []
        real = self.policy.remove

        def remove(key: int) -> None:
            self.left.append(key)
            real(key)

        self.policy.remove = remove  # type: ignore[method-assign]


@pytest.mark.parametrize("name", NAMES)
def test_the_replayer_decides_as_the_daemon(name: str, tmp_path: Path) -> None:
    """The same requests, once through store and tiers and once recorded and replayed: the same
    segments leave in the same order."""
    asks = a_day(7)
    hot_tokens = 400
    daemon = Daemon(tmp_path / "store", name, hot_tokens)
    for ask in asks:
        daemon.serve(ask)
        daemon.tiers.check_integrity()
        assert daemon.store.state.hot_bytes <= daemon.hot_bytes
    daemon.close()
    assert replayed(tmp_path / "day.trace", asks, name, hot_tokens) == daemon.left
    assert len(daemon.left) > 50


def replayed(path: Path, asks: list[Ask], name: str, tokens: int) -> list[tuple[int, ...]]:
    """What leaves a cache of so many tokens in a replay, steps and ends of workflows told, by the
    ids up to its end."""
    trace = load(recorded(path, asks), 1 << 20)
    text_of = {
        segment: tuple(ask.ids[: sum(trace.n_blocks[s] for s in call.path[: i + 1])].tolist())
        for ask, call in zip(asks, trace.calls, strict=True)
        for i, segment in enumerate(call.path)
    }
    trace.calls = [  # agents have other names in a trace, which may turn ties
        replace(call, ends=(), agent=ask.agent or "")
        for ask, call in zip(asks, trace.calls, strict=True)
    ]
    watched = Watched(name, trace)
    replay(trace, watched.policy, tokens, end_hints=True)
    return [text_of[key] for key in watched.left]


WIDE = KVLayout((plane_of("f16", 8192),), (plane_of("f16", 8192),))
"""A row is far larger than all that a file has besides rows."""


class Disk(Daemon):
    """Rows are on disk alone, of which so many tokens fit there."""

    def __init__(self, root: Path, policy: str, tokens: int) -> None:
        super().__init__(root, policy, 0, WIDE)
        self.tokens = tokens
        self.left.clear()
        real = self.tiers.ranking.warm_victims

        def watch(
            nbytes: int, is_evictable: Callable[[SegmentFile], bool], *, leave: bool = True
        ) -> list[SegmentFile]:
            found = real(nbytes, is_evictable, leave=leave)
            if not leave:
                return found
            self.gone += [
                tuple(node.prefix_ids().tolist())
                for file in found
                for node in self.store.viewers(file)
            ]
            return found

        self.gone: list[tuple[int, ...]] = []
        self.tiers.ranking.warm_victims = watch  # type: ignore[method-assign]

    def _enforce_disk(self) -> None:
        rows = sum(self.store.state.file_bytes(node) for node in self.store.nodes())
        besides = self.store.state.warm_bytes - rows
        self.tiers.warm_bytes_max = self.tokens * WIDE.token_bytes + besides
        self.tiers.flush()
        self.tiers.warm_bytes_max = 1 << 40


@pytest.mark.parametrize("name", NAMES)
def test_the_disk_tier_decides_as_the_replayer(name: str, tmp_path: Path) -> None:
    """Steps of workflows included: the same segments leave the disk in the same order."""
    asks = a_day(11, 60)
    disk = Disk(tmp_path / "store", name, 300)
    for ask in asks:
        disk.serve(ask)
        disk.tiers.check_integrity()
    disk.close()
    assert replayed(tmp_path / "day.trace", asks, name, 300) == disk.gone
    assert len(disk.gone) > 30


def test_what_running_workflows_share_stays_on_disk(tmp_path: Path) -> None:
    """A base under the prompts of three running workflows outlives what nobody shares, though it
    was used before; it goes last of all."""
    disk = Disk(tmp_path / "store", "pbkv", 10_000)
    base, rng = np.arange(40, dtype=np.int32), np.random.default_rng(5)

    def below(*ids: int) -> Ids:
        return np.concatenate([base, np.array(ids, np.int32)])

    first = disk.serve(Ask(1.0, "base", base, "stop", 0.1))
    for step in range(6):
        for workflow in range(3):
            at = 10.0 + 3 * step + workflow
            ids = below(*range(100 * workflow + 100, 100 * workflow + 102 + step))
            disk.serve(Ask(at, f"w{workflow}", ids, "stop", 0.1, ("plan", "code")[step % 2]))
    alone = disk.serve(Ask(50.0, "x", rng.integers(900, 990, 30).astype(np.int32), "stop", 0.1))
    ranking = disk.tiers.ranking
    order = ranking.warm_victims(1 << 40, lambda file: True)
    assert ranking.explain(first)["warm"]["score"] > ranking.explain(alone)["warm"]["score"] == 0.0
    assert order[0] is alone.file
    assert order[-1] is first.file
    disk.close()


def test_a_file_goes_with_the_last_that_is_in_it(tmp_path: Path) -> None:
    """The beginning of what was cut is in use: the file stays, and another one goes."""
    disk = Disk(tmp_path / "store", "lru", 10_000)
    ids = np.arange(40, dtype=np.int32)
    cut = disk.serve(Ask(1.0, "a", ids, "stop", 0.1))
    other = disk.serve(Ask(2.0, "b", ids[:30] + 500, "stop", 0.1))
    disk.serve(Ask(3.0, "c", np.append(ids[:20], 99).astype(np.int32), "stop", 0.1))
    upper = cut.parent
    assert upper is not None
    assert upper.file is cut.file is not None
    ranking = disk.tiers.ranking
    assert ranking.warm_victims(1, lambda file: True) == [other.file]
    assert ranking.warm_victims(1 << 40, lambda file: True)[-1] is cut.file
    disk.tiers.check_integrity()
    disk.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "store", "lru", 10_000)
    yield made
    made.close()


def expected(ranking: Ranking, nodes: Iterable[Node]) -> list[Node]:
    """Those whose rows are expected."""
    return [node for node in nodes if (ranking.explain(node)["hot"] or {}).get("expected")]


def test_rows_that_never_come_are_forgotten(daemon: Daemon) -> None:
    """A visit expects rows; if none arrive they neither stay in the account nor block others."""
    ranking = daemon.tiers.ranking
    daemon.now = 1.0
    ids = np.arange(30, dtype=np.int32)
    end = daemon.store.insert(ids, "local", [30])[-1]
    daemon.tiers.visited(end, 1.0)
    ranking.check_integrity()
    assert ranking.hot_victims(1, lambda key: True) == []
    assert expected(ranking, [end]) == [end]
    daemon.now = 62.0
    assert ranking.hot_victims(1, lambda key: True) == []
    assert ranking.explain(end)["hot"] is None
    ranking.check_integrity()


def test_rows_that_never_come_do_not_pile_up(daemon: Daemon) -> None:
    """As those of a chat that lives under a budget, where RAM is never full."""
    ranking = daemon.tiers.ranking
    for turn in range(1, 20):
        daemon.now = 61.0 * turn
        ids = np.arange(30 * turn, 30 * turn + 30, dtype=np.int32)
        end = daemon.store.insert(ids, "local", [30])[-1]
        daemon.tiers.visited(end, daemon.now)
        assert expected(ranking, daemon.store.nodes()) == [end]
        assert ranking.explain(end)["n_hot"] == 1


def test_a_visit_of_a_chat_with_a_partial_live_set(daemon: Daemon) -> None:
    """Only what has rows is used, as far as it goes: the rest will never have any."""
    ranking, ids = daemon.tiers.ranking, np.arange(300, dtype=np.int32)
    begun = daemon.serve(Ask(1.0, "a", ids[:30], "end_turn", 0.5))
    path = daemon.store.insert(ids, "local", [*range(30, 301, 10)])
    daemon.now = 5.0
    assert daemon.tiers.visited(path[-1], 5.0, 0) is begun
    assert ranking.explain(begun)["hot"]["used"] == 5.0
    assert ranking.explain(begun)["n_hot"] == 1
    assert not expected(ranking, path)
    assert daemon.tiers.visited(path[-1], 6.0, 50) is path[2]
    assert expected(ranking, path) == [path[1], path[2]]
    other = daemon.store.insert(np.arange(900, 950, dtype=np.int32), "local", [20, 50])
    assert daemon.tiers.visited(other[-1], 7.0, 0) is daemon.store.state.tree.root


def test_a_split_belongs_to_the_visit_that_caused_it(daemon: Daemon) -> None:
    """The beginning of what was cut gets its share, expected or there, and no use of its own."""
    ranking = daemon.tiers.ranking
    first = daemon.serve(Ask(1.0, "a", np.arange(30, dtype=np.int32), "end_turn", 0.5))
    daemon.serve(Ask(5.0, "b", np.array([*range(20), 99], np.int32), "end_turn", 0.5))
    assert daemon.store.state.hot_bytes == 31 * LAYOUT.token_bytes
    ranking.check_integrity()
    assert ranking.explain(first)["hot"]["used"] == 1.0
    upper = first.parent
    assert upper is not None
    assert ranking.explain(upper)["hot"]["used"] == 5.0
    assert ranking.explain(upper)["hot"]["place"] is None
    daemon.now = 9.0
    path = daemon.store.insert(np.arange(200, 240, dtype=np.int32), "local", [40])
    daemon.tiers.visited(path[-1], 9.0)
    daemon.store.insert(np.arange(200, 210, dtype=np.int32), "local", [10])
    assert ranking.hot_victims(1, lambda key: True) == [first.id]
    ranking.check_integrity()


def test_files_are_used_by_the_visit_that_wrote_them(daemon: Daemon) -> None:
    """The warm tier hears of a visit once its file is there, stop reason included."""
    end = daemon.serve(Ask(3.0, "a", np.arange(30, dtype=np.int32), "end_turn", 0.5))
    other = daemon.serve(Ask(4.0, "b", np.arange(50, 80, dtype=np.int32), "end_turn", 0.5))
    daemon.serve(Ask(8.0, "a", np.arange(33, dtype=np.int32), "end_turn", 0.5))
    ranking = daemon.tiers.ranking
    assert [ranking.explain(node)["warm"]["used"] for node in (end, other)] == [8.0, 4.0]
    assert end.file is not None
    assert other.file is not None
    everything = ranking.warm_victims(1 << 40, lambda file: True)
    assert everything[0] is other.file


def test_a_replaced_file_keeps_its_place(daemon: Daemon) -> None:
    """Re-encoding is not a use, and the new file is known at once."""
    end = daemon.serve(Ask(3.0, "a", np.arange(30, dtype=np.int32), "end_turn", 0.5))
    other = daemon.serve(Ask(4.0, "b", np.arange(50, 80, dtype=np.int32), "end_turn", 0.5))
    store, ranking = daemon.store, daemon.tiers.ranking
    assert end.file is not None
    new = store.rows.reencode(end.file, [FormatRequest(0, 30, "q8")])
    assert new is end.file
    assert ranking.warm_victims(1, lambda file: True) == [new]
    daemon.tiers.check_integrity()
    daemon.tiers.visited(end, 9.0)
    assert ranking.warm_victims(1, lambda file: True) == [other.file]
    assert ranking.warm_victims(1 << 40, lambda file: True) == [other.file, new]
    daemon.tiers.check_integrity()


def test_a_damaged_file_leaves_the_policy(daemon: Daemon) -> None:
    """It is set aside by whoever reads it, at any time."""
    end = daemon.serve(Ask(3.0, "a", np.arange(30, dtype=np.int32), "end_turn", 0.5))
    daemon.tiers.evictor.drop_hot(end.id)
    assert end.file is not None
    with end.file.path.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"damage")
    assert not list(
        daemon.tiers.rows(
            daemon.tiers.plan(daemon.tiers.store.hold(np.arange(30, dtype=np.int32), "local"), 0)
        )
    )
    assert end.file is None
    assert daemon.tiers.ranking.explain(end)["warm"] is None
    daemon.tiers.check_integrity()


def test_a_step_on_segments_that_are_gone_teaches_nothing(tmp_path: Path) -> None:
    """Its chat was deleted before the step was told."""
    daemon = Daemon(tmp_path / "store", "pbkv", 1000)
    end = daemon.serve(Ask(1.0, "s", np.arange(30, dtype=np.int32), "stop", 0.1, "plan"))
    daemon.store.gc(quarantine_days=0)
    assert end.removed
    daemon.tiers.ranking.stepped(end, "s", "plan", end)
    daemon.tiers.check_integrity()
    assert daemon.tiers.ranking.n_steps(["s"]) == {"s": 1}
    daemon.close()
