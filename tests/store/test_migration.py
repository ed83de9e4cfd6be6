"""A store that the release before tokenizer identities wrote is taken over, whole, wherever it is killed.

`data/schema7.tar.xz` was written by that release: two models of one tokenizer whose trees overlap
and end at different tokens, a third model of another tokenizer, bases, pins, workflows, frozen
sessions; `expected.json` beside the store is what that release read from it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from crash import killed_at
from old_segments import as_schema_7
from store_tools import FINGERPRINT, OTHER_MODEL, check_rows, turn_of

from towerd.slots.fingerprint import Fingerprint
from towerd.store import Store
from towerd.store.sessions.workflows import WorkflowTable

MODELS = {
    "A": FINGERPRINT,
    "B": OTHER_MODEL,
    "C": replace(FINGERPRINT, model_hash="third", tokenizer="bpe"),
}
RENAMED = {("B", "work"): "work (2)"}
"""Both models of one tokenizer had a session of this name."""


@pytest.fixture
def old(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    with tarfile.open(Path(__file__).parent / "data" / "schema7.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path / "store", json.loads((tmp_path / "expected.json").read_text())


def sessions_of(expected: dict[str, Any], *models: str) -> dict[str, Any]:
    return {
        RENAMED.get((model, id), id): found
        for model in models
        for id, found in expected[model]["sessions"].items()
    }


def check(root: Path, expected: dict[str, Any], opened: str) -> None:
    """Everything that the old release read is there."""
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
        assert sorted(node.prefix_ids().tolist() for node in store.pins()) == sorted(pins)
        check_bases_and_workflows(store, expected, group)
        store.check_integrity(keys=True)
        assert store.verify().ok, store.verify().problems


def check_frozen(store: Store, frozen: dict[str, list[int]]) -> None:
    for id, ids in frozen.items():
        found = store.cold.read(id)
        assert found is not None
        assert [*found.base.tolist(), *json.loads(found.blob)] == ids


def check_own_rows(store: Store, expected: dict[str, Any], opened: str) -> None:
    """The rows of a fingerprint are those of its own files."""
    for id, n_rows in expected[opened]["rows"].items():
        ids = np.array(expected[opened]["sessions"][id][2], np.int32)
        assert check_rows(store, store.match(ids, "local").nodes[-1]) >= n_rows


def check_bases_and_workflows(
    store: Store, expected: dict[str, Any], group: tuple[str, ...]
) -> None:
    (base,) = store.bases()
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
    with Store.open(root, FINGERPRINT) as store:
        assert store.session_ids("work").tolist() == [*ids, 1, 2]
        match = store.match(np.array(ids, np.int32), "local")
        assert check_rows(store, match.nodes[-1]) >= expected["A"]["rows"]["work"]


def reopen(root: Path, model: Fingerprint) -> None:
    Store.open(root, model).close()


def test_killed_anywhere_while_it_migrates(
    old: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Everything is there at the next start, and from the journal alone at the one after."""
    before, expected = old
    number, was_killed = 0, True
    while was_killed:
        number += 1
        root = tmp_path / "copy"
        shutil.copytree(before, root)
        was_killed = killed_at(number, partial(reopen, root, OTHER_MODEL))
        check(root, expected, "B")
        (root / "catalog.sqlite").unlink()
        check(root, expected, "A")
        shutil.rmtree(root)
    assert number > 20


def test_the_old_journal_counts_until_a_new_one_is_whole(
    old: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room for a journal after the migration, and then the catalog is lost: what the old journal
    has is there."""
    root, expected = old

    replace_file = os.replace

    def full(source: Path, to: Path) -> None:
        if to.suffix == ".snapshot":
            raise OSError(errno.ENOSPC, "no space")
        replace_file(source, to)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with Store.open(root, FINGERPRINT) as store:
            store.commit_turn(turn_of([1, 2], [3], session="new"))
    (root / "catalog.sqlite").write_bytes(b"")
    check(root, expected, "A")


def calls_to_migrate(root: Path, n_turns: int) -> int:
    """Calls of Python functions that it takes to open a chat of so many turns, each of which makes
    a path and a tip because its reply is rendered anew."""
    with Store.open(root, FINGERPRINT) as store:
        ids: list[int] = []
        for turn in range(n_turns):
            store.commit_turn(turn_of([*ids, turn], [1000 + turn, 7], session="chat"))
            ids += [turn, 2000 + turn]
    as_schema_7(root)
    (root / "catalog.sqlite.clean").unlink()
    n_calls = 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal n_calls
        n_calls += event == "call"

    sys.setprofile(count)
    try:
        store = Store.open(root, FINGERPRINT)
    finally:
        sys.setprofile(None)
    with store:
        assert len(store.turns("chat")) == n_turns
        store.check_integrity(keys=True)
    return n_calls


def test_a_long_chat_is_migrated_in_time(tmp_path: Path) -> None:
    """The work grows with turns times tips, not faster."""
    short, long = (calls_to_migrate(tmp_path / str(n), n) for n in (60, 240))
    assert long < 20 * short
