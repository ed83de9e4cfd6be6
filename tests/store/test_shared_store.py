"""A store that several models have open at once: each through the broker of its catalog."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import precondition, rule
from store_machine import StoreMachine
from store_tools import OTHER_MODEL, OTHER_TOKENIZER, ROW_IDENTITY, make_hot, turn_of

from towerd.errors import NotFound, ServedAlready, StoreError, StoreLocked
from towerd.slots.row_identity import RowIdentity
from towerd.store import Store
from towerd.store.catalog.shared.broker import CatalogBroker
from towerd.store.catalog.shared.remote import RemoteCatalog
from towerd.store.catalog.sqlite import SqliteCatalog
from towerd.store.rows.collect import drop_foreign
from towerd.store.sessions.media import SentMedium
from towerd.tiers.ranking import Ranking

IDS = np.arange(1, 41, dtype=np.int32)


class Shared:
    """The stores of one broker."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.broker = CatalogBroker(root)
        self._closing = ExitStack()
        self._closing.callback(self.broker.close)

    def open(self, model: RowIdentity) -> Store:
        store = Store.open(self.root, model, catalog_fd=self.broker.connect().socket.detach())
        self._closing.callback(store.close)
        return store

    def close(self) -> None:
        self._closing.close()


@pytest.fixture
def shared(root: Path) -> Iterator[Shared]:
    opened = Shared(root)
    yield opened
    opened.close()


class SharedStoreMachine(StoreMachine):
    """Every operation is one of either of two models with one tokenizer; both know all of it."""

    def open_store(self) -> None:
        self.broker = CatalogBroker(self.root)
        self.sides = []
        for model in (ROW_IDENTITY, OTHER_MODEL):
            fd = self.broker.connect().socket.detach()
            store = Store.open(self.root, model, clock=self.clock, catalog_fd=fd)
            ranking = Ranking(self.policy, store, self.clock)
            store.listen(ranking)
            ranking.found(store.nodes())
            self.sides.append((store, ranking))
        self.store, self.ranking = self.sides[0]

    def close_store(self) -> None:
        for store, _ in self.sides:
            store.close()
        self.broker.close()

    @rule()
    def change_sides(self) -> None:
        self.sides.reverse()
        self.store, self.ranking = self.sides[0]

    @precondition(lambda self: self.current)
    @rule()
    def one_side_leaves(self) -> None:
        """A model is unloaded, and loaded again."""
        gone, _ = self.sides.pop()
        model = gone.state.row_identity
        self.requests = [each for each in self.requests if each[0] is not gone]
        gone.close()
        fd = self.broker.connect().socket.detach()
        store = Store.open(self.root, model, clock=self.clock, catalog_fd=fd)
        ranking = Ranking(self.policy, store, self.clock)
        store.listen(ranking)
        ranking.found(store.nodes())
        self.sides.append((store, ranking))

    def check(self) -> None:
        for store, ranking in self.sides:
            store.check_integrity()
            ranking.check_integrity()


SharedStoreMachine.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestSharedStoreMachine = SharedStoreMachine.TestCase


def test_what_one_model_learns_the_other_knows(shared: Shared) -> None:
    one, two = shared.open(ROW_IDENTITY), shared.open(OTHER_MODEL)
    told = one.commit_turn(turn_of(IDS.tolist(), [1, 2, 3, 4, 5], n_cached=44))
    assert [each.id for each in two.sessions()] == [told.session_id]
    assert two.match(np.concatenate([IDS, IDS[:5]]), "local").n == 44
    again = two.commit_turn(turn_of([*IDS, *IDS[:5], 7], [9], n_cached=46))
    assert again.session_id == told.session_id
    assert one.session_ids(told.session_id).tolist() == [*IDS, *IDS[:5], 7, 9]


def test_rows_stay_apart_and_survive_the_splits_of_the_other(shared: Shared) -> None:
    one, two = shared.open(ROW_IDENTITY), shared.open(OTHER_MODEL)
    for store in (one, two):
        path = store.insert(IDS, "local", [40])
        make_hot(store, path[-1])
        store.rows.write(path)
    two.insert(np.array([*IDS[:17], 99], np.int32), "local", [18])
    for store in (one, two):
        (part, rest) = store.plan_rows(store.match(IDS, "local"), 0, 40)
        assert (part.p1, rest.p1) == (17, 40)
        store.check_integrity(keys=True)
    assert one.state.warm_bytes == two.state.foreign_bytes > 0


def test_what_is_written_while_a_model_is_being_opened(shared: Shared) -> None:
    """A process that has connected, and has read nothing yet, is told of no changes."""
    one = shared.open(ROW_IDENTITY)
    late = shared.broker.connect().socket
    path = one.insert(IDS, "local", [40])
    make_hot(one, path[-1])
    one.rows.write(path)
    with Store.open(shared.root, OTHER_MODEL, catalog_fd=late.detach()) as two:
        assert two.match(IDS, "local").n == 40
        two.check_integrity()


def test_a_file_that_another_model_evicts_is_forgotten(shared: Shared) -> None:
    one, two = shared.open(ROW_IDENTITY), shared.open(OTHER_MODEL)
    path = one.insert(IDS, "local", [40])
    make_hot(one, path[-1])
    file = one.rows.write(path)
    one.rows.drop_hot(path[-1])
    assert drop_foreign(two.state, 1) == file.nbytes
    assert not one.plan_rows(one.match(IDS, "local"), 0, 40)
    one.check_integrity()


def test_the_larger_of_two_open_models_gives_first(shared: Shared) -> None:
    one, two = shared.open(ROW_IDENTITY), shared.open(OTHER_MODEL)
    files = []
    for first in (100, 200, 300):
        path = one.insert(IDS + first, "local", [40])
        make_hot(one, path[-1])
        files.append(one.rows.write(path))
    mine = two.insert(IDS, "local", [40])
    make_hot(two, mine[-1])
    two.rows.write(mine)
    pinned = one.match(IDS + 100, "local").nodes[-1]
    one.pins.add(pinned.id)
    one.touch(one.match(IDS + 200, "local").nodes[-1])
    one.flush()
    assert drop_foreign(two.state, 1) == files[2].nbytes
    assert drop_foreign(two.state, 1 << 40) == files[1].nbytes  # the pinned one is left
    assert [file.id for file in one.files()] == [files[0].id]
    one.check_integrity()


def test_a_file_of_another_model_under_a_used_id_is_not_taken_for_the_old_one(
    shared: Shared,
) -> None:
    """The catalog gives the id of the newest file, once that is deleted, to the next one."""
    one, two = shared.open(ROW_IDENTITY), shared.open(OTHER_MODEL)
    path = one.insert(IDS, "local", [40])
    make_hot(one, path[-1])
    old = one.rows.write(path)
    drop_foreign(two.state, 1)
    mine = two.insert(IDS + 100, "local", [40])
    make_hot(two, mine[-1])
    assert two.rows.write(mine).id == old.id
    one.check_integrity()
    one.gc()
    two.check_integrity()


def test_what_could_not_be_learned_is_told_again(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = shared.open(ROW_IDENTITY), shared.open(OTHER_MODEL)
    one.insert(IDS, "local", [40])
    two.insert(np.array([*IDS[:20], 99], np.int32), "local", [21])  # splits it
    real = RemoteCatalog.rows
    failures = [StoreError("a disk error")]

    def rows(self: RemoteCatalog, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        if failures:
            raise failures.pop()
        return real(self, sql, params)

    monkeypatch.setattr(RemoteCatalog, "rows", rows)
    with pytest.raises(StoreError, match="a disk error"):
        one.nodes()
    one.insert(np.array([*IDS[:10], 98], np.int32), "local", [11])
    for store in (one, two):
        store.check_integrity(keys=True)


def test_who_waits_for_a_snapshot_stops_nobody(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted data are purged from the journal, which waits for a snapshot that is being written,
    which waits for the lock."""
    purging = threading.Event()
    real = SqliteCatalog.purge

    def purge(self: SqliteCatalog) -> None:
        purging.set()
        real(self)

    monkeypatch.setattr(SqliteCatalog, "purge", purge)
    store = shared.open(ROW_IDENTITY)
    store.insert(IDS, "local", [40])
    with shared.broker.catalog.paused():  # as a snapshot does
        collecting = threading.Thread(target=store.gc)
        collecting.start()
        assert purging.wait(60)
        with store.locked():  # and what it needs is free
            pass
    collecting.join()


def test_an_unexpected_failure_ends_no_connection(shared: Shared) -> None:
    store = shared.open(ROW_IDENTITY)
    with pytest.raises(StoreError, match="the catalog failed"):
        store.state.catalog.rows("SELECT ?", (1 << 63,))
    assert store.insert(IDS, "local", [40])


def test_a_request_of_one_model_holds_its_path_for_all(shared: Shared) -> None:
    one, two = shared.open(ROW_IDENTITY), shared.open(OTHER_MODEL)
    one.insert(IDS, "local", [40])
    with one.hold(IDS, "local") as handle:
        handle.match()
        assert two.gc().segments == 0
    one.flush()  # whoever takes the lock tells what it holds
    assert two.gc().segments == 1
    assert one.match(IDS, "local").n == 0


def test_a_pin_counts_for_all(shared: Shared) -> None:
    one, two = shared.open(ROW_IDENTITY), shared.open(OTHER_MODEL)
    node = one.insert(IDS, "local", [40])[-1]
    two.pins.add(node.id)
    assert one.node(node.id).pinned
    one.pins.remove(node.id)
    assert not two.node(node.id).pinned


def test_other_tokenizers_share_the_budget_and_nothing_else(shared: Shared) -> None:
    one, two = shared.open(ROW_IDENTITY), shared.open(OTHER_TOKENIZER)
    path = one.insert(IDS, "local", [40])
    make_hot(one, path[-1])
    one.rows.write(path)
    assert two.nodes() == []
    with two.locked():
        assert two.state.foreign_bytes == one.state.warm_bytes
    with pytest.raises(NotFound):
        two.node(path[-1].id)


def test_a_conversation_entered_under_another_tokenizer_is_known_to_its_model(
    shared: Shared,
) -> None:
    one, two = shared.open(ROW_IDENTITY), shared.open(OTHER_TOKENIZER)
    told = two.commit_turn(turn_of(IDS.tolist(), [1, 2, 3], n_cached=42))
    history, digest = one.foreign.history(told.session_id)
    assert one.foreign.add_history(replace(history, id="imported"), "b", digest) == 1
    assert two.session_ids("imported", "b").tolist() == [*IDS, 1, 2, 3]
    two.check_integrity(keys=True)
    assert one.nodes() == []


def test_one_model_is_not_opened_twice(shared: Shared) -> None:
    shared.open(ROW_IDENTITY)
    with pytest.raises(ServedAlready, match="served already"):
        shared.open(ROW_IDENTITY)


def test_a_store_with_a_broker_is_locked(shared: Shared) -> None:
    with pytest.raises(StoreLocked, match=str(os.getpid())):
        Store.open(shared.root, ROW_IDENTITY)


def test_without_its_broker_a_store_fails_in_a_sentence(root: Path) -> None:
    broker = CatalogBroker(root)
    store = Store.open(root, ROW_IDENTITY, catalog_fd=broker.connect().socket.detach())
    broker.close()
    with pytest.raises(StoreError, match="start towerd again"):
        store.sessions()
    with pytest.raises(StoreError, match="start towerd again"):
        store.close()
    Store.open(root, ROW_IDENTITY).close()


_VICTIM = """
import os, sys
import numpy as np
from store_tools import OTHER_MODEL, turn_of
from towerd.store import Store
store = Store.open(sys.argv[1], OTHER_MODEL, catalog_fd=int(sys.argv[2]))
ids = np.arange(1, 41, dtype=np.int32)
store.commit_turn(turn_of(ids, [5], n_cached=41))
with store.locked(), store.state.growing() as growth:
    growth.grow(ids[:7].tobytes(), "local", [7])
    print("in a transaction", flush=True)
    sys.stdin.read()
"""


def test_a_file_that_several_turns_rely_on_stays_for_each(shared: Shared) -> None:
    """Whichever of them ends first, and whoever deletes the session that has it."""
    one, other = shared.open(ROW_IDENTITY), shared.open(OTHER_MODEL)
    picture = SentMedium(bytes(16), b"picture" * 999)
    one.commit_turn(replace(turn_of([1], [2], session="seen"), media=[picture]))
    (path,) = (shared.root / "media").iterdir()
    with other.media.written([picture], "local") as kept:
        for store in (one, other):
            with store.media.written([picture], "local"):
                pass
        one.delete_session("seen")
        assert path.exists()
        assert [each.name for each in kept] == [path.name]
    one.gc()
    assert not path.exists()


def test_a_killed_process_leaves_nothing_half_done(shared: Shared) -> None:
    """It is killed inside a transaction, with the lock: others go on with what it had committed."""
    one, theirs = shared.open(ROW_IDENTITY), shared.broker.connect().socket
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, str(shared.root), str(theirs.fileno())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    theirs.close()
    with victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"in a transaction\n"
        victim.send_signal(signal.SIGKILL)
    (session,) = one.sessions()
    assert one.session_ids(session.id).tolist() == [*range(1, 41), 5]
    assert len(one.match(IDS, "local").nodes) == 1
    one.check_integrity(keys=True)
