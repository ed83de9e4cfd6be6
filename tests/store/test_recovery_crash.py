"""kill -9 before every call of the system while catalog and journal are written or recovered."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash import killed_at
from encrypted_stores import KINDS, page_of
from store_tools import ROW_IDENTITY, turn_of

from towerd.store import Store
from towerd.store.encryption.opening import is_encrypted

CHAT = {str(n): [*range(30), 1000 + n, *range(100 * n, 100 * n + 20)] for n in range(3)}
MARK = (1002).to_bytes(4, "little")
"""What only one of the chats has."""
NEW = [*range(20), 7, 7, 7]
Step = Callable[[Path], None]


def talk(root: Path) -> None:
    with Store.open(root, ROW_IDENTITY) as store:
        for name, ids in CHAT.items():
            store.commit_turn(turn_of(ids[:40], ids[40:], session=name))


def commit(root: Path) -> None:
    with Store.open(root, ROW_IDENTITY) as store:
        store.commit_turn(turn_of(NEW[:-1], NEW[-1:], session="new"))
        store.flush()


def collect(root: Path) -> None:
    """A session goes, and the journal is rewritten without it."""
    with Store.open(root, ROW_IDENTITY) as store:
        store.commit_turn(turn_of(NEW[:-1], NEW[-1:], session="new"))
        store.delete_session("new")
        store.gc()


def reopen(root: Path) -> None:
    Store.open(root, ROW_IDENTITY).close()


def lose_catalog(root: Path) -> None:
    (root / "catalog.sqlite").unlink()


def lose_journal(root: Path) -> None:
    shutil.rmtree(root / "journal")


def damage_both(root: Path) -> None:
    """Different turns: neither alone has everything."""
    catalog, (log,) = root / "catalog.sqlite", (root / "journal").glob("*.log")
    data = bytearray(catalog.read_bytes())
    data[page_of("tokenizers", root) + 99 if is_encrypted(root) else data.index(MARK)] ^= 1
    catalog.write_bytes(data)
    data = bytearray(log.read_bytes())
    data[len(data) // 3] ^= 1
    log.write_bytes(data)


STEPS: dict[str, tuple[list[Step], Step]] = {
    "committing": ([talk], commit),
    "rewriting the journal": ([talk], collect),
    "rebuilding the catalog": ([talk, lose_catalog], reopen),
    "writing a lost journal": ([talk, lose_journal], reopen),
    "putting both together": ([talk, damage_both], reopen),
}


def check(root: Path) -> None:
    with Store.open(root, ROW_IDENTITY) as store:
        for name, ids in CHAT.items():
            assert store.session_ids(name).tolist() == ids
        found = {info.id for info in store.sessions()}
        assert found - CHAT.keys() <= {"new"}
        if "new" in found:
            assert store.session_ids("new").tolist() == NEW
        assert store.verify().ok, store.verify().problems


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory if that can be had: a killed process loses nothing there either."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
        yield Path(made)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", STEPS)
def test_killed_anywhere(folder: Path, what: str, kind: str) -> None:
    """Everything is there afterwards, and once more from the journal alone."""
    before, step = STEPS[what]
    KINDS[kind](folder / "before")
    for prepare in before:
        prepare(folder / "before")
    number, was_killed = 0, True
    while was_killed:
        number += 1 if kind == "plain" else 1 + number // 20  # it connects again after each page
        root = folder / "store"
        shutil.copytree(folder / "before", root)
        was_killed = killed_at(number, lambda root=root: step(root))  # type: ignore[misc]
        check(root)
        lose_catalog(root)
        check(root)
        shutil.rmtree(root)
    assert number > 20
