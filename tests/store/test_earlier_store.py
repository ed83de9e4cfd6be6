"""A store that an earlier towerd wrote is read, whole, gets the tables that it lacks, and its catalog is
made again from its journal; one of another schema is refused.

`data/schema8.tar.xz` was written by one with schema version 8: two models of one tokenizer whose trees overlap and
end at different tokens, a third model of another tokenizer, bases, pins, workflows, frozen sessions;
`expected.json` beside the store is what is in it.
"""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
import tarfile
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash import killed_at
from store_tools import OTHER_MODEL, ROW_IDENTITY, check_rows, turn_of

from towerd.errors import StoreVersion
from towerd.store import Store
from towerd.store.catalog.journal.frames import frames
from towerd.store.catalog.journal.journal import Journal
from towerd.store.catalog.schema import VERSION
from towerd.store.sessions.workflows import WorkflowTable

MODELS = {
    "A": ROW_IDENTITY,
    "B": OTHER_MODEL,
    "C": replace(ROW_IDENTITY, model_hash="third", tokenizer="bpe"),
}
RENAMED = {("B", "work"): "work (2)"}
"""Both models of one tokenizer had a session of this name."""


@pytest.fixture
def old(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    with tarfile.open(Path(__file__).parent / "data" / "schema8.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path / "store", json.loads((tmp_path / "expected.json").read_text())


def sessions_of(expected: dict[str, Any], *models: str) -> dict[str, Any]:
    return {
        RENAMED.get((model, id), id): found
        for model in models
        for id, found in expected[model]["sessions"].items()
    }


def check(root: Path, expected: dict[str, Any], opened: str) -> None:
    """Everything that the earlier build wrote is there."""
    group = ("C",) if opened == "C" else ("A", "B")
    with Store.open(root, MODELS[opened]) as store:
        wanted = sessions_of(expected, *group)
        infos = {info.id: info for info in store.sessions()}
        assert infos.keys() == wanted.keys()
        for id, (title, updated, ids) in wanted.items():
            assert (infos[id].title, infos[id].updated) == (title, updated)
            assert bool(infos[id].cold_bytes) == (ids is None)
            if ids is not None:
                assert store.session_ids(id).tolist() == ids
        for model in group:
            check_frozen(store, expected[model]["frozen"])
        check_own_rows(store, expected, opened)
        pins = [pin for model in group for pin in expected[model]["pins"]]
        assert sorted(node.prefix_ids().tolist() for node in store.pins.listing()) == sorted(pins)
        check_bases_and_workflows(store, expected, group)
        store.check_integrity(keys=True)
        assert store.verify().ok, store.verify().problems


def check_frozen(store: Store, frozen: dict[str, list[int]]) -> None:
    for id, ids in frozen.items():
        found = store.cold.read(id)
        assert found is not None
        assert [*found.base.tolist(), *json.loads(found.blob)] == ids


def check_own_rows(store: Store, expected: dict[str, Any], opened: str) -> None:
    """The rows of a row identity are those of its own files."""
    for id, n_rows in expected[opened]["rows"].items():
        ids = np.array(expected[opened]["sessions"][id][2], np.int32)
        assert check_rows(store, store.match(ids, "local").nodes[-1]) >= n_rows


def check_bases_and_workflows(
    store: Store, expected: dict[str, Any], group: tuple[str, ...]
) -> None:
    (base,) = store.bases.listing()
    assert store.node(base.node).prefix_ids().tolist() == expected[group[0]]["bases"]["system"]
    steps = {
        (step.workflow, step.session) for w in WorkflowTable(store.state).history() for step in w
    }
    assert steps == {
        (flow, RENAMED.get((model, session), session))
        for model in group
        for flow, session in expected[model]["workflows"]
    }


@pytest.mark.parametrize("opened", MODELS)
def test_everything_is_there_under_each_model(
    old: tuple[Path, dict[str, Any]], opened: str
) -> None:
    check(*old, opened)
    check(*old, {"A": "B", "B": "A", "C": "A"}[opened])


def test_a_chat_of_one_model_continues_under_the_other(old: tuple[Path, dict[str, Any]]) -> None:
    """Its turn is recorded in the same session, and the rows of both models grow side by side."""
    root, expected = old
    ids = expected["A"]["sessions"]["work"][2]
    with Store.open(root, OTHER_MODEL) as store:
        assert store.recognise(np.array([*ids, 1], np.int32), "local") == "work"
        result = store.commit_turn(turn_of([*ids, 1], [2]))
        assert (result.session_id, result.new_session) == ("work", False)
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.session_ids("work").tolist() == [*ids, 1, 2]
        match = store.match(np.array(ids, np.int32), "local")
        assert check_rows(store, match.nodes[-1]) >= expected["A"]["rows"]["work"]


@pytest.mark.parametrize("opened", ["A", "B"])
def test_a_gc_leaves_rows_that_private_segments_share_with_public_ones(
    old: tuple[Path, dict[str, Any]], opened: str
) -> None:
    """Their file is of the public scope, also when no other public segment views its end."""
    root, _ = old
    with Store.open(root, MODELS[opened]) as store:
        n_rows = {
            node.id: check_rows(store, node) for node in list(store.state.tree.nodes.values())
        }
        store.gc()
        assert store.verify().ok, store.verify().problems
    with Store.open(root, MODELS[opened]) as store:
        for node in list(store.state.tree.nodes.values()):
            assert check_rows(store, node) == n_rows[node.id]
        assert store.verify().ok, store.verify().problems


def test_the_catalog_is_made_again_from_its_journal(old: tuple[Path, dict[str, Any]]) -> None:
    """Also where only a few bytes of it are wrong; nothing is said to be lost."""
    root, expected = old
    (root / "catalog.sqlite").unlink()
    check(*old, "A")
    (root / "catalog.sqlite.clean").unlink()
    data = bytearray((root / "catalog.sqlite").read_bytes())
    data[100:116] = bytes(16)
    (root / "catalog.sqlite").write_bytes(data)
    with Store.open(root, ROW_IDENTITY) as store:
        (note,) = store.state.catalog.recovered
    assert "rebuilt from its journal" in note
    assert "lost" not in note
    check(root, expected, "B")


def test_a_new_store_has_the_same_tables(old: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """To the letter: their text is part of what a catalog is checked by."""
    assert version_of(old[0]) == 8
    for root in (old[0], tmp_path / "new"):
        Store.open(root, ROW_IDENTITY).close()
        assert version_of(root) == VERSION
    found = []
    for root in (old[0], tmp_path / "new"):
        with closing(sqlite3.connect(root / "catalog.sqlite")) as db:
            query = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
            found.append(db.execute(query).fetchall())
    assert found[0] == found[1]


def version_of(root: Path) -> int:
    with closing(sqlite3.connect(root / "catalog.sqlite")) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def open_and_close(root: Path) -> None:
    Store.open(root, ROW_IDENTITY).close()


def note_something(root: Path) -> None:
    """A row in one of the tables that version 8 lacks."""
    with Store.open(root, ROW_IDENTITY) as store:
        catalog = store.state.catalog
        facts = {"scope": "local", "name": "conv_1", "metadata": "{}", "created": 1.0}
        with catalog.lock, catalog.transaction():
            catalog.insert("conversations", **facts)


def has_something(root: Path) -> bool:
    with Store.open(root, ROW_IDENTITY) as store:
        return bool(store.state.catalog.sealed("conversations", "name = ?", ("conv_1",)))


@pytest.mark.parametrize("lost", ["nothing", "catalog.sqlite"])
def test_a_kill_while_tables_are_added_loses_nothing(
    old: tuple[Path, dict[str, Any]], tmp_path: Path, lost: str
) -> None:
    """Before every call of the system and every step in SQLite; also if the catalog goes with it."""
    root, expected = old
    (root / "catalog.sqlite.clean").unlink()  # so that all of it is checked as well
    versions = set()
    for number in count(1):
        copy = tmp_path / "copy"
        shutil.copytree(root, copy)
        if not killed_at(number, partial(open_and_close, copy)):
            break
        versions.add(version_of(copy))
        if lost != "nothing":
            for path in copy.glob(lost + "*"):
                path.unlink()
        with Store.open(copy, ROW_IDENTITY) as store:
            assert not any("lost" in note for note in store.state.catalog.recovered)
            assert store.state.catalog.problems() == store.state.catalog.journal_problems() == []
        check(copy, expected, "A")
        shutil.rmtree(copy)
    assert versions == {8, VERSION}


def test_the_journal_of_two_versions_is_one(
    old: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk was too full to write it again, what was noted since is behind the older snapshot."""
    root, expected = old

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write_snapshot", fails)
        note_something(root)
    for path in root.glob("catalog.sqlite*"):
        path.unlink()
    assert has_something(root)
    check(root, expected, "A")


def test_a_damaged_catalog_of_the_earlier_version_helps_a_damaged_journal(
    old: tuple[Path, dict[str, Any]],
) -> None:
    """Each has what the other has lost."""
    root, expected = old
    (snapshot,) = (root / "journal").glob("*.snapshot")
    data = bytearray(snapshot.read_bytes())
    first = next(frames(snapshot, bytes(data)))
    data[first.end - 1] ^= 1
    snapshot.write_bytes(data)
    catalog = root / "catalog.sqlite"
    data = bytearray(catalog.read_bytes())
    ids = np.array(expected["A"]["sessions"]["work"][2][:8], np.int32).tobytes()
    data[data.index(ids)] ^= 1
    catalog.write_bytes(data)
    (root / "catalog.sqlite.clean").unlink()
    check(root, expected, "A")


@pytest.mark.parametrize(
    ("version", "whose"), [(7, "that wrote it"), (VERSION + 1, "a newer towerd")]
)
def test_another_schema_is_refused(
    old: tuple[Path, dict[str, Any]], version: int, whose: str
) -> None:
    """With one sentence, and nothing is changed."""
    root, _ = old
    shutil.rmtree(root / "journal")
    with closing(sqlite3.connect(root / "catalog.sqlite")) as db:
        db.execute(f"PRAGMA user_version = {version}")
    before = (root / "catalog.sqlite").read_bytes()
    with pytest.raises(StoreVersion, match=whose):
        Store.open(root, ROW_IDENTITY)
    assert (root / "catalog.sqlite").read_bytes() == before
