"""A store's lives on a simulated disk: nothing is found, and what is planted is."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from encrypted_stores import KINDS
from simulate import simulate

from towerd.store import Store
from towerd.store.catalog import database
from towerd.store.files import durable
from towerd.tiers.ranking import Ranking

SEEDS = 50
PLANTED_SEEDS = 200


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


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_faults_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each within the seeds, with what is needed to look at it again."""
    plant(monkeypatch)
    found = (simulate(seed)[0] for seed in range(PLANTED_SEEDS))
    failure = next((each for each in found if each is not None), None)
    assert failure is not None
    assert f"make simulate SEED={failure.seed}" in failure.text()
