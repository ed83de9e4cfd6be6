"""A store with ten sessions, ways to damage its files, and a check that nothing is missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from crash import killed_after
from encrypted_stores import connect, page_of
from store_tools import ROW_IDENTITY, make_hot, turn_of

from towerd.store import Store, latest_row_identity

N_SESSIONS = 10
MARK = "a value that is found in the file"
WAL, DATABASE = "catalog.sqlite-wal", "catalog.sqlite"
Damage = Callable[[Path], None]


def tokens(session: int) -> list[int]:
    """All of a session: shared ones, its own, and a reply whose last token has no rows."""
    return [*range(50), *(100_000 + 1000 * session + i for i in range(40))]


def populate(store: Store) -> None:
    """Ten sessions, one of two turns; a title, a pin, a base, a workflow's worth of files."""
    store.set_meta("mark", MARK)
    store.bases.add("base", np.arange(20, dtype=np.int32), "local", 0, False)
    for session in range(N_SESSIONS):
        ids, name = tokens(session), f"session-{session}"
        store.commit_turn(turn_of(ids[:60], ids[60:70], session=name))
        store.commit_turn(turn_of(ids[:80], ids[80:], session=name))
    leaf = store.node(store.turns("session-0")[-1].reply_node)
    make_hot(store, leaf)
    store.rows.write(leaf.path())
    store.rename_session("session-3", "A title")
    store.pins.add(leaf.id)


def committed_and_killed(root: Path) -> None:
    """All of it is in the WAL."""

    def work() -> None:
        populate(Store.open(root, ROW_IDENTITY))

    killed_after(work)
    assert (root / "catalog.sqlite-wal").stat().st_size > 100_000


def closed(root: Path) -> None:
    with Store.open(root, ROW_IDENTITY) as store:
        populate(store)
    assert not (root / "catalog.sqlite-wal").exists()


def check(root: Path) -> None:
    """Everything is there, and the store is sound."""
    with Store.open(root, latest_row_identity) as store:
        check_open(store)


def check_open(store: Store) -> None:
    assert store.state.row_identity == ROW_IDENTITY
    assert len(store.sessions()) == N_SESSIONS
    for session in range(N_SESSIONS):
        name = f"session-{session}"
        assert store.session_ids(name).tolist() == tokens(session)
        assert len(store.turns(name)) == 2
        assert store.history(name).ids(0).tolist() == tokens(session)[:70]
    assert store.session("session-3").title == "A title"
    assert store.get_meta("mark") == MARK
    assert [base.name for base in store.bases.listing()] == ["base"]
    assert len(store.pins.listing()) == 1
    assert len(store.files()) == 1
    store.check_integrity(keys=True)
    assert store.verify().ok


def flip(path: Path, at: int, bit: int = 4) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def flips(name: str, at: int, bits: Sequence[int]) -> Damage:
    """Flip bits of one byte."""

    def damage(root: Path) -> None:
        for bit in bits:
            flip(root / name, at, bit)

    return damage


def flip_in(name: str, content: bytes) -> Damage:
    """Flip a bit of `content` wherever it lies in a file."""

    def damage(root: Path) -> None:
        path = root / name
        data, at = path.read_bytes(), -1
        while (at := data.find(content, at + 1)) >= 0:
            flip(path, at + len(content) // 2)

    return damage


def flip_index(index: str) -> Damage:
    """Flip a bit of the last entry on an index's first page."""

    def damage(root: Path) -> None:
        flip(root / "catalog.sqlite", page_of(index, root) + 4096 - 4)

    return damage


def remove(*names: str) -> Damage:
    def damage(root: Path) -> None:
        for name in names:
            path = root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def write(name: str, data: bytes | None) -> Damage:
    """Replace a file's content; None: half of what it has."""

    def damage(root: Path) -> None:
        path = root / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] if data is None else data)

    return damage


def ids_bytes(ids: list[int]) -> bytes:
    return np.array(ids, "<i4").tobytes()


def log_of(root: Path) -> Path:
    """The journal's log."""
    (log,) = (root / "journal").glob("*.log")
    return log


def change(root: Path, statement: str) -> None:
    """What no towerd wrote, in a file that one has open."""
    with closing(connect(root)) as db:
        db.execute(statement)
