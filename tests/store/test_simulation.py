"""A store's lives on a simulated disk, alone and under many threads: nothing is found, and what is planted is."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from encrypted_stores import KINDS
from house import House
from house_tenants import GUEST
from programs import run_python
from simulate import simulate

from towerd import transfer
from towerd.sessions.recorder import TurnRecorder
from towerd.store import Store, Turn
from towerd.store.catalog import database
from towerd.store.catalog.vocabularies import Vocabularies
from towerd.store.files import durable
from towerd.store.maintenance import forget
from towerd.store.rows import rows
from towerd.store.sessions import media
from towerd.store.sessions.media import MediaTable
from towerd.store.state.state import StoreState
from towerd.tiers.manager import Tiers
from towerd.tiers.ranking import Ranking
from towerd.tiers.writer import RowsWriter

SEEDS = 50
PLANTED_SEEDS = 200
FIRST_PLANTED = 125
"""Of those with threads: of few seeds that find what is found seldom, some follow soon."""


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_found(kind: str) -> None:
    """Power cuts, full disks, flipped bits, lost catalogs and clocks that jump."""
    for seed in range(SEEDS):
        failure, _ = simulate(seed, KINDS[kind])
        assert failure is None, failure.text()


def test_a_seed_is_the_same_again() -> None:
    """Down to the changes of the disk, or a failure could not be looked at."""
    first, again = simulate(3)[1], simulate(3)[1]
    assert first == again
    assert len(first) > 20


def test_nothing_is_found_among_threads() -> None:
    """Tiers, recorder and several clients at once, in whatever order, on a slow, full or failing disk."""
    for seed in range(SEEDS):
        failure, _ = simulate(seed, kind=House)
        assert failure is None, failure.text()


def test_threads_have_their_turns_in_the_same_order_again() -> None:
    def lived(seed: int, folder: Path) -> House:
        houses.append(House(seed, folder))
        return houses[-1]

    houses: list[House] = []
    for _ in range(2):
        assert simulate(2, kind=lived)[0] is None
    first, again = houses
    assert first.operations == again.operations
    assert first.turns == again.turns
    assert len(set(first.turns)) > 5


LIVED = """
import hashlib
from broker_simulation import BrokerHouse
from house import House
from programs import run_python
from simulate import simulate, simulated_router
lived = [simulate(3, kind=kind)[1] for kind in (House, BrokerHouse)] + [simulated_router(3)[1]]
for operations in lived:
    print(len(operations), hashlib.md5("\\n".join(operations).encode()).hexdigest())
"""


def test_a_seed_is_the_same_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its hashes of strings, its id and the addresses of its objects are."""
    said = []
    for seed in "12":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        said.append(run_python(LIVED))
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == 3


def no_sync_of_segments(patch: pytest.MonkeyPatch) -> None:
    """A segment file's name may go."""
    _without_sync_of("segments", patch)


def no_sync_of_the_journal(patch: pytest.MonkeyPatch) -> None:
    """The name of a journal's log may go."""
    _without_sync_of("journal", patch)


def _without_sync_of(folder: str, patch: pytest.MonkeyPatch) -> None:
    real = durable.sync_dir

    def sync_dir(path: Path) -> None:
        if path.name != folder:
            real(path)

    patch.setattr(durable, "sync_dir", sync_dir)


def no_sync_before_the_rename(patch: pytest.MonkeyPatch) -> None:
    """A file may have its name without its content."""
    real = durable.new_file

    @contextmanager
    def new_file(half: Path, final: Path, **_: object) -> Iterator[int]:
        with real(half, final, is_durable=False) as fd:
            yield fd
        durable.sync_dir(final.parent)

    patch.setattr(durable, "new_file", new_file)


def split_heard_late(patch: pytest.MonkeyPatch) -> None:
    """The ranking hears of a split after the visit that made it."""
    late: list[Any] = []
    split: Callable[..., None] = Ranking.split
    visited: Callable[..., None] = Ranking.visited

    def visit(self: Ranking, *args: Any) -> None:
        visited(self, *args)
        while late:
            split(self, *late.pop(0))

    patch.setattr(Ranking, "split", lambda self, *nodes: late.append(nodes))
    patch.setattr(Ranking, "visited", visit)


def turn_before_its_commit(patch: pytest.MonkeyPatch) -> None:
    """SQLite says that a transaction is done before it is durable."""
    real = database.configure

    def configure(db: sqlite3.Connection) -> None:
        real(db)
        db.execute("PRAGMA synchronous = OFF")

    patch.setattr(database, "configure", configure)


def deletion_in_idle_time(patch: pytest.MonkeyPatch) -> None:
    """A session is deleted at the next flush, so a power cut brings it back."""
    waiting: list[tuple[Store, str]] = []
    delete: Callable[..., None] = Store.delete_session
    flush: Callable[..., None] = Store.flush

    def flushed(self: Store) -> None:
        for store, id in waiting:
            if store is self:
                delete(store, id)
        waiting.clear()
        flush(self)

    patch.setattr(Store, "delete_session", lambda self, id: waiting.append((self, id)))
    patch.setattr(Store, "flush", flushed)


PLANTED = (
    no_sync_of_segments,
    no_sync_of_the_journal,
    no_sync_before_the_rename,
    split_heard_late,
    turn_before_its_commit,
    deletion_in_idle_time,
)


def preempted_job(patch: pytest.MonkeyPatch) -> None:
    """The tiers write the segments that they listed before they let go of the lock, and do not look again."""
    patch.setattr(rows, "as_split", list)


def no_lock_around_a_split(patch: pytest.MonkeyPatch) -> None:
    """A turn grows the tree without the store's lock."""
    own = threading.local()
    locked: Callable[..., Any] = StoreState.locked
    commit: Callable[..., Any] = Store.commit_turn

    @contextmanager
    def locked_but_for_turns(self: StoreState) -> Iterator[None]:
        if getattr(own, "is_turn", False):
            yield
        else:
            with locked(self):
                yield

    def commit_turn(self: Store, turn: Turn) -> Any:
        own.is_turn = True
        try:
            return commit(self, turn)
        finally:
            own.is_turn = False

    patch.setattr(StoreState, "locked", locked_but_for_turns)
    patch.setattr(Store, "commit_turn", commit_turn)


class ForgetfulEvent:
    """An event that knows nothing of having been set, so that who waits too late waits for ever."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def set(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait(timeout)


def lost_wake_up(patch: pytest.MonkeyPatch) -> None:
    """The tiers may have flushed before who asked for it waits."""
    flush: Callable[..., None] = Tiers.flush

    def flushed(self: Tiers, timeout_s: float | None = None) -> None:
        with pytest.MonkeyPatch.context() as forgetful:
            forgetful.setattr(threading, "Event", ForgetfulEvent)
            flush(self, timeout_s)

    patch.setattr(Tiers, "flush", flushed)


def turn_left_to_another_thread(patch: pytest.MonkeyPatch) -> None:
    """A turn is acknowledged before it is durable."""
    record: Callable[..., Any] = TurnRecorder.record

    async def record_soon(self: TurnRecorder, turn: Turn, *, answered: bool = True) -> str:
        def work() -> None:
            with suppress(StopIteration):
                record(self, turn, answered=answered).send(None)

        threading.Thread(target=work, name="soon").start()
        return turn.session or ""

    patch.setattr(TurnRecorder, "record", record_soon)


def rows_that_a_flush_forgets(patch: pytest.MonkeyPatch) -> None:
    """The rows of one segment stay in RAM, and are taken for written."""
    write: Callable[..., None] = RowsWriter.write_remaining

    def all_but_one(self: RowsWriter) -> None:
        if self.unwritten:
            self.unwritten.discard(min(self.unwritten))
        write(self)

    patch.setattr(RowsWriter, "write_remaining", all_but_one)


def words_that_gc_leaves(patch: pytest.MonkeyPatch) -> None:
    """Of a tokenizer that was never served, those that deleted chats alone have said."""
    patch.setattr(Vocabularies, "keep_words", lambda *_: None)


def media_that_gc_leaves(patch: pytest.MonkeyPatch) -> None:
    """Files of deleted sessions, beside the catalog."""

    @contextmanager
    def leaving(self: MediaTable, session: int) -> Iterator[None]:
        yield

    patch.setattr(MediaTable, "leaving", leaving)
    patch.setattr(MediaTable, "sweep", lambda self: 0)


def a_tenant_forgotten_with_the_others(patch: pytest.MonkeyPatch) -> None:
    """What is forgotten of a tenant is that of all."""
    patch.setattr(forget, "tenant_of", lambda scope: GUEST)


def media_that_tenants_share(patch: pytest.MonkeyPatch) -> None:
    """Who sends a picture that another tenant has sent can tell, by how much the disk has."""
    patch.setattr(media, "tenant_of", lambda scope: "")


def picture_that_an_import_replaces(patch: pytest.MonkeyPatch) -> None:
    """A file says that a picture of a chat that is here is another one."""
    patch.setattr(transfer, "lacked_media", lambda store, file, *rest: (file.sent(), 0))


PLANTED_AMONG_THREADS = (
    picture_that_an_import_replaces,
    a_tenant_forgotten_with_the_others,
    media_that_tenants_share,
    rows_that_a_flush_forgets,
    words_that_gc_leaves,
    media_that_gc_leaves,
    preempted_job,
    no_lock_around_a_split,
    lost_wake_up,
    turn_left_to_another_thread,
)


@pytest.mark.parametrize("plant", PLANTED_AMONG_THREADS, ids=lambda plant: plant.__name__)
def test_faults_planted_among_threads_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each within the seeds, with the names of the threads in what it did last."""
    plant(monkeypatch)
    seeds = range(FIRST_PLANTED, FIRST_PLANTED + PLANTED_SEEDS)
    found = (simulate(seed, kind=House)[0] for seed in seeds)
    failure = next((each for each in found if each is not None), None)
    assert failure is not None
    assert f"make simulate SEED={failure.seed} KIND={failure.kind}" in failure.text()


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_faults_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each within the seeds, with what is needed to look at it again."""
    plant(monkeypatch)
    found = (simulate(seed)[0] for seed in range(PLANTED_SEEDS))
    failure = next((each for each in found if each is not None), None)
    assert failure is not None
    assert f"make simulate SEED={failure.seed} KIND={failure.kind}" in failure.text()
