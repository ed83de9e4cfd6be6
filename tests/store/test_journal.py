"""The journal of an open store: damage that it heals, its size, and what it does without room."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from programs import run_python
from store_tools import ROW_IDENTITY, turn_of
from ten_sessions import (
    DATABASE,
    change,
    check,
    check_open,
    flip,
    ids_bytes,
    log_of,
    populate,
    remove,
    tokens,
)

from towerd.errors import StoreError
from towerd.store import Store

BOTH_KINDS = True


def test_damage_under_a_running_store_is_healed(root: Path) -> None:
    """A row whose checksum is wrong is not served: the catalog is rebuilt at once."""
    with Store.open(root, ROW_IDENTITY) as store:
        populate(store)
        change(root, "UPDATE turns SET tail = zeroblob(4)")
        check_open(store)
        store.commit_turn(turn_of([1, 2], [3], session="more"))
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.session_ids("more").tolist() == [1, 2, 3]
        store.delete_session("more")
    check(root)


def test_verify_repairs_while_the_store_is_open(root: Path) -> None:
    """It names what is wrong, changes nothing by itself, and makes it right when told to."""
    with Store.open(root, ROW_IDENTITY) as store:
        populate(store)
        change(root, "UPDATE sessions SET title = 'other' WHERE id = 'session-3'")
        reports = [store.verify(repair=repair) for repair in (False, True)]
        assert all("wrong checksums in sessions: 1" in each.problems[0] for each in reports)
        assert [len(each.recovered) for each in reports] == [0, 1]
        check_open(store)
        flip(log_of(root), 3000)
        assert "is damaged" in store.verify(repair=True).problems[0]
        check_open(store)
        remove("journal")(root)
        assert "journal:" in store.verify().problems[0]
        store.flush()
        check_open(store)
    remove(DATABASE)(root)
    check(root)


def test_a_journal_that_is_not_whole_never_heals_a_running_store(root: Path) -> None:
    """The error says what to do; the next start puts both together."""
    with Store.open(root, ROW_IDENTITY) as store:
        populate(store)
        change(root, "UPDATE turns SET tail = zeroblob(4) WHERE id = 2")
        flip(log_of(root), 100)
        with pytest.raises(StoreError, match="restart towerd") as caught:
            store.session_ids("session-0")
        assert str(root) in caught.value.message
        assert str(root) not in caught.value.body()["error"]["message"]
        assert "restart towerd" in store.verify(repair=True).problems[-1]
    check(root)


def test_deleted_sessions_are_in_no_file_after_gc(root: Path) -> None:
    """Neither in the catalog and its WAL nor in the journal."""
    with Store.open(root, ROW_IDENTITY) as store:
        populate(store)
        store.delete_session("session-5")
        store.gc()
        for path in root.rglob("*"):
            data = path.read_bytes() if path.is_file() else b""
            assert ids_bytes(tokens(5)[60:62]) not in data, path
            assert b"session-5" not in data, path


def test_the_journal_stays_small(root: Path) -> None:
    """It is rewritten in idle moments when most of it is history, and loses nothing by it."""
    rng = random.Random(0)
    with Store.open(root, ROW_IDENTITY) as store:
        populate(store)
        sizes, value = [], ""
        for _ in range(20):
            for _ in range(20):
                value = rng.randbytes(10_000).hex()
                store.set_meta("value", value)
            store.flush()
            sizes.append(store.stats()["journal_bytes"])
    assert max(sizes) < 2_000_000
    remove(DATABASE)(root)
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.get_meta("value") == value
        check_open(store)


def test_ids_are_not_used_again(root: Path) -> None:
    """Not even when the journal was rewritten after their segments were removed."""
    with Store.open(root, ROW_IDENTITY) as store:
        (leaf,) = store.insert(np.arange(10, dtype=np.int32), "local", [10])
        store.gc()
    remove(DATABASE)(root)
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.nodes() == []
        (after,) = store.insert(np.arange(10, dtype=np.int32), "local", [10])
        assert after.id > leaf.id


def test_without_room_for_the_journal_turns_are_still_recorded(root: Path) -> None:
    """The catalog has them; the journal is made whole as soon as there is room."""
    done = run_python(
        """
        import resource, sys
        from pathlib import Path
        from store_tools import ROW_IDENTITY, turn_of
        from towerd.store import Store
        root = Path(sys.argv[1])
        store = Store.open(root, ROW_IDENTITY)
        for turn in range(30):
            store.commit_turn(turn_of(range(turn, turn + 3000), [1], session="a"))
        store.flush()
        (log,) = (root / "journal").glob("*.log")
        resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 10, -1))
        store.commit_turn(turn_of([5] * 50, [6], session="b"))
        assert "changes of" in store.verify().problems[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        store.commit_turn(turn_of([7] * 50, [8], session="c"))
        store.flush()
        assert store.verify().ok
        (root / "catalog.sqlite").unlink()
        print(len(store.sessions()))
        """,
        str(root),
    )
    assert done == "3\n"
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.session_ids("b").tolist() == [5] * 50 + [6]
        assert store.session_ids("c").tolist() == [7] * 50 + [8]
