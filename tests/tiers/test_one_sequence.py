"""Changes and uses of a store reach the tiers in one sequence: while a commit takes
its time, and in between the two steps of what takes two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seams import connections, hot_policy
from store_tools import LAYOUT, ROW_IDENTITY, insert_in_vain, rows_of
from waiting import until

from towerd.errors import StoreError
from towerd.policy.foresight import Foresight
from towerd.store import Node, Store
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import Gap

N = 40
CUT = 15
HERE = "local"


class WatchedLock:
    """A lock that tells which threads wait for it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.waiting: set[int | None] = set()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waiting.add(threading.get_ident())
            self._lock.acquire()
            self.waiting.discard(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Bench:
    """Tiers with a chat that is about to be cut, and others before it."""

    def __init__(self, root: Path) -> None:
        with connections() as opened:
            self.store = Store.open(root, ROW_IDENTITY)
        self.db = opened[-1]
        self.db.execute("PRAGMA synchronous = OFF")  # there are many
        self.lock = WatchedLock(self.store.state.lock)
        self.store.state.catalog.lock = self.lock
        with hot_policy(Foresight) as made:
            self.tiers = Tiers(
                self.store, LAYOUT, v_trans=False, hot_bytes=1 << 30, warm_bytes=1 << 30,
                policy="foresight",
            )  # fmt: skip
        self.policy = made[0]
        self.now = 0.0
        self.ids = np.zeros(N, np.int32)
        self.end = self.other = self.begin()
        self.heat()
        self.begin()

    def begin(self) -> Node:
        """Another chat; its end."""
        self.ids = np.arange(self.ids[-1] + 1, self.ids[-1] + 1 + N, dtype=np.int32)
        self.end = self.store.insert(self.ids, HERE, [N])[-1]
        return self.end

    def close(self) -> None:
        self.tiers.close()
        self.store.close()

    def visit(self, end: Node) -> None:
        self.now += 1.0
        self.tiers.visited(end, self.now)

    def heat(self) -> None:
        """Rows of the chat come from the live context, and are written."""
        self.visit(self.store.insert(self.ids, HERE, [N])[-1])
        for gap in self.tiers.gaps(self.ids, HERE):
            self.tiers.accept(gap, rows_of(self.ids[: gap.p1], gap.p0))
        self.tiers.flush()

    def cool(self) -> None:
        """The rows of the chat are on disk alone."""
        self.heat()
        self.evict(hot=1)
        self.evict()

    def cut(self, at: int = CUT) -> None:
        self.store.insert(self.ids[:at], HERE, [at])

    def fail_to_cut(self) -> None:
        with pytest.raises(StoreError, match="FOREIGN KEY"):
            insert_in_vain(self.store, self.ids[:CUT], HERE, [CUT])

    def evict(self, hot: int = 1 << 30, warm: int = 1 << 30) -> None:
        self.tiers.hot_bytes_max, self.tiers.warm_bytes_max = hot, warm
        self.tiers.flush()

    def check(self) -> None:
        self.tiers.flush()
        self.tiers.check_integrity()

    def is_held_up(self, asking: threading.Thread) -> bool:
        """Whether a call has ended, or it or the tier thread waits for the store."""
        moving = {each.ident for each in threading.enumerate() if each.name == "towerd-tiers"}
        waiting = self.lock.waiting & {asking.ident, *moving}
        return bool(waiting) or not asking.is_alive()

    @contextmanager
    def slow_commit(self, work: Callable[[], None]) -> Iterator[None]:
        """Inside the block `work` is between its change of the tree and the end of its commit."""
        reached, release = threading.Event(), threading.Event()

        def wait(sql: str) -> None:
            if sql == "COMMIT":
                reached.set()
                assert release.wait(60)

        db = self.db
        with self.store.locked():
            db.set_trace_callback(wait)
        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert reached.wait(60)
            yield
        finally:
            release.set()
            thread.join()
            with self.store.locked():
                db.set_trace_callback(None)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], Bench]]:
    """Makes benches, each with a store of its own."""
    made: list[Bench] = []

    def bench() -> Bench:
        made.append(Bench(tmp_path / str(len(made))))
        return made[-1]

    yield bench
    for each in made:
        each.close()


STATES: dict[str, Callable[[Bench], None]] = {
    "nothing": lambda bench: None,
    "expected": lambda bench: bench.visit(bench.end),
    "hot": lambda bench: bench.heat(),
    "warm": lambda bench: bench.cool(),
}
"""Where the rows of the chat are when it is cut."""


def promote(bench: Bench) -> None:
    """A request reads the rows and is recorded."""
    for _ in bench.tiers.rows(bench.tiers.plan(bench.tiers.store.hold(bench.ids, HERE), 0)):
        pass
    bench.visit(bench.end)
    bench.tiers.flush()


CALLS: dict[str, Callable[[Bench], object]] = {
    "visited": lambda bench: bench.visit(bench.end),
    "visited another": lambda bench: bench.visit(bench.other),
    "answered": lambda bench: bench.tiers.ranking.answered(bench.end, 9.0, "tool_use"),
    "stepped": lambda bench: bench.tiers.ranking.stepped(bench.end, "w", "a"),
    "ended": lambda bench: bench.tiers.ranking.ended(bench.end),
    "workflow ended": lambda bench: bench.tiers.ranking.workflow_ended("w"),
    "explain": lambda bench: bench.tiers.ranking.explain(bench.end),
    "wanted": lambda bench: bench.tiers.ranking.wanted(5),
    "accept": lambda bench: bench.tiers.accept(Gap((bench.end,), 0, N), rows_of(bench.ids)),
    "write": lambda bench: bench.tiers.flush(),
    "promote": promote,
    "evict rows": lambda bench: bench.evict(hot=1),
    "evict files": lambda bench: bench.evict(warm=1),
    "evict both": lambda bench: bench.evict(hot=1, warm=1),
    "remove": lambda bench: bench.store.gc(),
    "damage": lambda bench: bench.store.verify(repair=True),
}


@pytest.mark.parametrize(
    ("state", "ending"),
    [*[(state, Bench.cut) for state in STATES], ("hot", Bench.fail_to_cut)],
)
def test_while_a_segment_is_cut(
    make: Callable[[], Bench], state: str, ending: Callable[[Bench], None]
) -> None:
    """Every call comes between the cut and the end of its commit. None sees the half of it, and
    one that is refused never was."""
    bench = make()
    for name, call in CALLS.items():
        bench.begin()
        STATES[state](bench)
        asking = threading.Thread(target=call, args=(bench,))
        with bench.slow_commit(lambda: ending(bench)):
            asking.start()
            until(lambda: bench.is_held_up(asking))  # noqa: B023
        asking.join(60)
        assert not asking.is_alive(), name
        bench.check()
        bench.heat()
        bench.evict(hot=1)
        assert bench.store.state.hot_bytes == 0, name
        bench.evict()
        bench.check()


def test_visits_of_what_is_gone(make: Callable[[], Bench]) -> None:
    """A removed segment does not come back to life in a policy; what it stood on is used."""
    bench = make()
    path = bench.store.insert(bench.ids, HERE, [CUT, N])
    bench.heat()
    bench.store.pins.add(path[0].id)
    bench.store.gc()
    bench.visit(path[-1])
    bench.tiers.ranking.answered(path[-1], 9.0, "end_turn")
    bench.tiers.accept(Gap((path[-1],), CUT, N), rows_of(bench.ids, CUT))
    assert bench.tiers.ranking.explain(path[-1])["hot"] is None
    assert bench.tiers.ranking.explain(path[0])["hot"]["used"] == bench.now
    bench.check()


def test_rows_of_a_long_answer_are_waited_for(make: Callable[[], Bench]) -> None:
    """It took more than a minute to compute: that is not how long the rows are overdue."""
    bench = make()
    bench.tiers.visited(bench.end, time.time() - 100.0)
    bench.tiers.ranking.settle()
    assert bench.tiers.ranking.explain(bench.end)["hot"]["expected"]
    bench.visit(bench.other)
    assert bench.tiers.ranking.explain(bench.end)["hot"]["expected"]
    bench.check()


@contextmanager
def cut_before(bench: Bench, name: str, at: int = CUT) -> Iterator[None]:
    """Inside the block the chat is cut just before the method of the store's rows is called."""
    real = getattr(bench.store.rows, name)

    def cut_first(*args: Any, **options: Any) -> Any:
        bench.cut(at)
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.store.rows, name, cut_first)
        yield


@pytest.mark.parametrize("at", ["load", "attach_hot"])
def test_cut_while_it_is_promoted(make: Callable[[], Bench], at: str) -> None:
    """Both parts come, and both can leave again."""
    bench = make()
    STATES["warm"](bench)
    with cut_before(bench, at):
        promote(bench)
    assert [node.hot is None for node in bench.end.path()] == [False, False]
    bench.check()
    bench.evict(hot=1)
    assert bench.store.state.hot_bytes == 0


def test_cut_after_it_was_read(make: Callable[[], Bench]) -> None:
    """What waits for its promotion waits in both parts."""
    bench = make()
    STATES["warm"](bench)
    for _ in bench.tiers.rows(bench.tiers.plan(bench.tiers.store.hold(bench.ids, HERE), 0)):
        pass
    bench.cut()
    bench.visit(bench.end)
    bench.tiers.flush()
    assert [node.hot is None for node in bench.end.path()] == [False, False]
    bench.check()


def test_cut_before_it_is_written(make: Callable[[], Bench]) -> None:
    """All rows get to disk, and nothing counts as an error."""
    bench = make()
    bench.visit(bench.end)
    middle = bench.store.insert(bench.ids, HERE, [30])[0]
    with cut_before(bench, "write", 35):
        bench.tiers.accept(Gap((middle, bench.end), 0, N), rows_of(bench.ids))
        bench.tiers.flush()
    path = bench.end.path()
    assert [node.p1 for node in path] == [30, 35, N]
    assert all(node.file is not None for node in path)
    assert bench.tiers.stats()["write_errors"] == 0
    assert bench.tiers.stats()["unwritten_segments"] == 0
    bench.check()


def test_removed_before_it_is_written(
    make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left to write, which is no error."""
    bench = make()
    real = bench.store.rows.write

    def remove_first(*args: Any, **options: Any) -> Any:
        bench.store.gc()
        return real(*args, **options)

    monkeypatch.setattr(bench.store.rows, "write", remove_first)
    bench.tiers.accept(Gap((bench.end,), 0, N), rows_of(bench.ids))
    bench.check()
    assert bench.store.nodes() == []
    assert bench.tiers.stats()["write_errors"] == 0


def test_rows_leave_whose_file_left_before(make: Callable[[], Bench]) -> None:
    """What the disk has no room for must not fill RAM for ever."""
    bench = make()
    bench.heat()
    bench.evict(warm=1)
    assert bench.end.hot is not None
    assert bench.end.file is None
    bench.evict(hot=1)
    assert bench.store.state.hot_bytes == 0
    bench.check()
