"""A budget of bytes a day: it holds, tokens are durable whatever it says, and rows come back."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from budgeted import CHAT_BYTES, CHAT_TOKENS, LAYOUT, chat_ids, opened, talk, tiers_of
from store_tools import check_rows
from waiting import until

from towerd.slots.layout import NATIVE
from towerd.store.files.writes import KINDS, SHARES, DailyWrites
from towerd.tiers.shrink import SINKS, TAIL

SUPPORT = Path(__file__).parent.parent / "support"
DAY_S = 86_400.0
YEAR_S = 365 * DAY_S
BUDGET = 24 << 20
N_CHATS = 10 * BUDGET // CHAT_BYTES
"""Ten times as many bytes of rows as may be written."""
OWN_BYTES = 4096
"""What the count itself and the output take."""


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1.7e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system counts no written bytes")
def test_the_budget_holds_and_tokens_survive(tmp_path: Path) -> None:
    """Against what the kernel counted. The process is killed; then nobody gets a new budget, every
    turn is there, and what has no rows is evaluated again."""
    root = tmp_path / "store"
    command: list[str | Path] = [
        sys.executable,
        SUPPORT / "budgeted.py",
        root,
        str(BUDGET),
        str(N_CHATS),
    ]
    env = {**os.environ, "PYTHONPATH": f"{SUPPORT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == -signal.SIGKILL, done.stderr
    said = json.loads(done.stdout)
    assert said["called"] <= BUDGET
    assert said["called"] <= said["today_bytes"] + N_CHATS * OWN_BYTES  # nothing goes uncounted
    assert said["hot"] <= 5 * CHAT_BYTES
    assert said["refused"] > 0
    with opened(root) as store:
        assert store.writes.stats()["today_bytes"] >= said["today_bytes"]
        store.writes.budget = BUDGET
        tiers = tiers_of(store, 1 << 30)
        n_with_rows = 0
        for number in range(N_CHATS):
            ids = chat_ids(number)
            assert np.array_equal(store.session_ids(f"s{number}"), ids)
            n_missing = sum(gap.p1 - gap.p0 for gap in tiers.gaps(ids, "local"))
            assert n_missing in (0, CHAT_TOKENS)
            n_with_rows += not n_missing
        assert 0 < n_with_rows < N_CHATS / 2
        assert tiers.gaps(talk(store, tiers, N_CHATS - 1).prefix_ids(), "local") == []
        tiers.close()
        store.check_integrity()


def test_rows_wait_and_are_written_once_in_their_format(tmp_path: Path, clock: Clock) -> None:
    """Those of a chat that was never continued four times as long; then in the format of their level at
    once, with sinks and tail as computed."""
    with opened(tmp_path / "store", clock) as store:
        store.writes.budget = 1 << 30
        tiers = tiers_of(store, 1 << 30, 100.0, clock)
        lone, continued = talk(store, tiers, 1), talk(store, tiers, 2)
        store.touch(continued)
        clock.now += 150
        until(lambda: continued.file is not None)
        assert lone.file is None
        clock.now += 300
        until(lambda: lone.file is not None)
        for node in (lone, continued):
            kept = [(SINKS, NATIVE), (CHAT_TOKENS - SINKS - TAIL, "q8h"), (TAIL, NATIVE)]
            assert node.file is not None
            assert [(run.n_rows, run.format) for run in node.file.runs] == kept
            for each in node.path():
                store.rows.drop_hot(each)
            assert check_rows(store, node) == CHAT_TOKENS
        clock.now += 1000
        tiers.flush()
        assert store.writes.today()["reencoded"] == 0
        tiers.close()
        store.check_integrity(keys=True)


def test_the_next_day_writing_resumes(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path / "store", clock) as store:
        store.writes.budget = 4 * CHAT_BYTES
        tiers = tiers_of(store, 1 << 30, 0.0, clock)
        for number in range(10):
            talk(store, tiers, number)
        tiers.flush()
        n_files = len(store.files())
        assert 0 < n_files < 10
        assert tiers.stats()["unwritten_segments"] > 0
        clock.now += DAY_S
        tiers.flush()
        assert len(store.files()) > n_files
        assert sum(store.writes.today().values()) <= store.writes.budget
        clock.now -= YEAR_S  # no new budget
        spent = sum(store.writes.today().values())
        n_files = len(store.files())
        tiers.flush()
        assert len(store.files()) == n_files
        assert sum(store.writes.today().values()) >= spent
        clock.now += DAY_S  # the day after it
        tiers.flush()
        assert len(store.files()) > n_files
        tiers.close()


def test_without_a_budget_rows_are_written_at_once(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        tiers = tiers_of(store, 1 << 30, 1e6)
        node = talk(store, tiers, 1)
        tiers.flush()
        assert node.file is not None
        assert store.writes.stats()["budget_bytes"] is None
        assert store.writes.today()["rows"] == sum(file.nbytes for file in store.files())
        tiers.close()


@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_what_saves_less_than_it_writes_is_not_encoded(
    tmp_path: Path, clock: Clock, budget: int
) -> None:
    """A tail that is no end any more is rewritten only where nothing limits writing."""
    with opened(tmp_path / "store", clock) as store:
        store.writes.budget = budget
        tiers = tiers_of(store, 1 << 30, 10.0, clock)
        node = talk(store, tiers, 1)
        clock.now += 50
        until(lambda: node.file is not None)
        if not budget:
            until(lambda: store.writes.today()["reencoded"] > 0)
        before = store.writes.today()["reencoded"]
        more = np.concatenate([chat_ids(1), chat_ids(2)])
        store.insert(more, "local", [len(more)])
        clock.now += 50
        if budget:
            tiers.flush()
            assert store.writes.today()["reencoded"] == 0
        else:
            until(lambda: store.writes.today()["reencoded"] > before)
        tiers.close()


def test_days_are_counted_by_all_processes(tmp_path: Path, clock: Clock) -> None:
    """Each adds to the same count; a damaged file begins anew, and a lost one does no harm."""
    one, two = (DailyWrites(tmp_path, clock) for _ in range(2))
    one.add("rows", 5)
    two.add("journal", 7)
    assert one.today() == two.today() == dict.fromkeys(KINDS, 0) | {"rows": 5, "journal": 7}
    two.budget = 20
    assert two.allows("rows", 4)
    assert not two.allows("rows", 5)  # a fifth is for tokens
    assert two.allows("catalog", 8)
    assert set(SHARES) < set(KINDS)
    (path,) = tmp_path.iterdir()
    for wrong in (b"", b"x" * path.stat().st_size, path.read_bytes()[:-1] + b"\0"):
        path.write_bytes(wrong)
        assert DailyWrites(tmp_path, clock).today() == dict.fromkeys(KINDS, 0)
    one.close()
    one.add("rows", 1)
    assert one.today()["rows"] == 6


def test_a_process_that_stands_still_while_it_counts(tmp_path: Path, clock: Clock) -> None:
    """Others do not wait for it; what they count meanwhile is added later, by the end at the latest."""
    one, two = (DailyWrites(tmp_path, clock) for _ in range(2))
    one.add("rows", 5)
    (path,) = tmp_path.iterdir()
    with path.open("rb") as stopped, ThreadPoolExecutor(1) as pool:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        try:
            adding = pool.submit(one.add, "rows", 3)
            adding.result(timeout=30)
            assert one.today()["rows"] == 8
            assert two.today()["rows"] == 5
        finally:
            fcntl.flock(stopped, fcntl.LOCK_UN)
        one.add("rows", 1)
        assert two.today()["rows"] == 9
        fcntl.flock(stopped, fcntl.LOCK_EX)
        one.add("rows", 2)
        fcntl.flock(stopped, fcntl.LOCK_UN)
    one.close()
    assert two.today()["rows"] == 11
    clock.now += DAY_S
    assert two.today()["rows"] == 0


@pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S, 1e12, -1e12])
def test_a_clock_that_jumps_stops_nothing(tmp_path: Path, clock: Clock, jump_s: float) -> None:
    """Rows are written after a jump; a year on, and back, a day has its budget again."""
    with opened(tmp_path / "store", clock) as store:
        store.writes.budget = 1 << 30
        tiers = tiers_of(store, 1 << 30, 100.0, clock)
        node = talk(store, tiers, 1)
        clock.now += jump_s
        until(lambda: node.file is not None)
        clock.now -= jump_s
        after = talk(store, tiers, 2)
        clock.now += 1000
        until(lambda: after.file is not None)
        assert LAYOUT.token_bytes * TAIL < store.writes.today()["rows"] < 3 * CHAT_BYTES
        tiers.close()
