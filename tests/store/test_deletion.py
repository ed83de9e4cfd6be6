"""Deleting is a promise: once acknowledged it survives every kill, and after the next gc no file has
anything of what was deleted."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crash import killed_at
from store_tools import (
    OTHER_MODEL,
    OTHER_TOKENIZER,
    ROW_IDENTITY,
    check_rows,
    turn_of,
    write_all,
)

from towerd.errors import SessionDeleted, StoreError
from towerd.store import Store
from towerd.store.catalog.identity import TokenizerIdentity
from towerd.store.catalog.journal.journal import read_chain
from towerd.store.catalog.shared.broker import CatalogBroker
from towerd.store.catalog.vocabularies import KnownWords, some_words
from towerd.store.files.file_map import PlainFiles
from towerd.store.rows.checkpoints import CheckpointTable
from towerd.store.segments.checkpoint_file import CUT_META
from towerd.store.sessions.workflows import Invocation, WorkflowTable

SHARED = list(range(500, 540))
"""A beginning that both chats have, in one file with the rest of the one that is deleted."""
KEPT = [*SHARED, *range(7_000_000, 7_000_030)]
SECRET = list(range(0x895400, 0x895400 + 60))
"""Ids that occur nowhere else."""
ONE, TWO = (re.compile(rb"([\x00-\x3b]\x54\x89\x00){%d}" % n) for n in (1, 2))
"""What ids of SECRET look like (int32 LE)."""
GONE = [*SHARED, *SECRET]


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory if that can be had: a killed process loses nothing there either."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
        yield Path(made)


def talk(root: Path) -> None:
    """Both chats, with rows and states, as a hybrid model has them."""
    with Store.open(root, ROW_IDENTITY) as store:
        store.set_meta(CUT_META + store.state.digest.hex(), "boundary")
        node = store.commit_turn(turn_of(GONE[:60], GONE[60:], session="gone")).node
        store.commit_turn(turn_of(GONE[:50], GONE[70:], session="gone"))
        write_all(store, node)  # the shared beginning and the secret in one file
        store.commit_turn(turn_of(KEPT[:50], KEPT[50:], session="kept"))
        table = CheckpointTable(store.state)
        for ids in (GONE, KEPT):
            states = {60: (np.full(500, ids[-1], "<i4").view(np.uint8), False)}
            for each in table.attach(np.array(ids, np.int32), "local", states):
                table.write(each)


def delete(root: Path, acknowledged: Callable[[], None]) -> None:
    with Store.open(root, ROW_IDENTITY) as store:
        store.delete_session("gone")
        acknowledged()
        store.gc()


def found_in(root: Path) -> list[str]:
    """The files in which ids of SECRET stand as they are, and the journal if one of its records has
    one when it is decoded."""
    found = [
        path.name for path in root.rglob("*") if path.is_file() and TWO.search(path.read_bytes())
    ]
    cells = (
        cell
        for changes in read_chain(root / "journal").changes()
        for change in changes
        for row in change.rows
        for cell in row
    )
    if any(isinstance(cell, bytes) and ONE.search(cell) for cell in cells):
        found.append("a record of the journal")
    return found


def ids_of(store: Store, name: str) -> list[int]:
    ids: list[int] = store.session_ids(name).tolist()
    return ids


def check(root: Path, *, acknowledged: bool) -> None:
    """The chat is whole, if its deletion was not acknowledged, or gone; the other one is whole."""
    with Store.open(root, ROW_IDENTITY) as store:
        names = {info.id for info in store.sessions()}
        assert names in ({"kept"}, {"kept", "gone"})
        if "gone" in names:
            assert not acknowledged
            assert [turn.n_prompt for turn in store.turns("gone")] == [60, 50]
            assert ids_of(store, "gone") == [*GONE[:50], *GONE[70:]]
        assert ids_of(store, "kept") == KEPT
        assert store.recognise(np.array([*GONE, 1], np.int32), "local") in (None, "gone")
        assert store.verify().ok, store.verify().problems


@pytest.mark.slow
def test_killed_anywhere(folder: Path) -> None:
    """Before every call of the system of a deletion and the gc after it: afterwards, and in a
    catalog that is rebuilt from the journal, an acknowledged deletion holds, and once a gc has
    ended no file has anything of it."""
    talk(folder / "before")
    assert found_in(folder / "before")
    number, was_killed, n_acknowledged = 0, True, 0
    root, mark = folder / "store", folder / "mark"
    while was_killed:
        number += 1
        shutil.copytree(folder / "before", root)
        was_killed = killed_at(number, lambda: delete(root, mark.touch))
        is_acknowledged = mark.exists()
        n_acknowledged += is_acknowledged
        if is_acknowledged:
            with Store.open(root, ROW_IDENTITY) as store:
                store.gc()
                assert found_in(root) == [], number
        check(root, acknowledged=is_acknowledged)
        (root / "catalog.sqlite").unlink()
        check(root, acknowledged=is_acknowledged)
        shutil.rmtree(root)
        mark.unlink(missing_ok=True)
    assert number > 20
    assert n_acknowledged > 10


@pytest.mark.parametrize("name", ["gone", None])
def test_a_turn_on_its_way_brings_nothing_back(root: Path, name: str | None) -> None:
    """A request sends all of its conversation again: recorded after the deletion, its turn would be
    the deleted conversation under the same name, or as a new session."""
    talk(root)
    with Store.open(root, ROW_IDENTITY) as store:
        before, ids = store.deletions.watch(), np.array([*GONE, 1, 2, 3], np.int32)
        store.delete_session("gone")
        with pytest.raises(SessionDeleted):
            store.commit_turn(replace(turn_of([*GONE, 1], [2, 3], session=name), since=before))
        if name is None:
            with pytest.raises(SessionDeleted):
                store.insert(ids, "local", [len(ids)], before)
        with store.hold(ids, "local") as running:
            running.match()  # it needs its path until it ends, and no longer
            store.gc()
        assert store.gc().segments > 0
        assert [info.id for info in store.sessions()] == ["kept"]
        assert found_in(root) == []
        again = replace(turn_of([*GONE, 1], [2, 3], session=name), since=store.deletions.watch())
        assert store.commit_turn(again).new_session


def test_turns_of_other_chats_are_recorded(root: Path) -> None:
    """One that only begins alike, one of another tenant, one that has all of the deleted chat itself."""
    talk(root)
    with Store.open(root, ROW_IDENTITY) as store:
        store.commit_turn(turn_of([*GONE, 1], [2, 3], session="copy"))
        store.commit_turn(turn_of(GONE[:60], GONE[60:], session="gone", scope="other"))
        before = store.deletions.watch()
        store.delete_session("gone", "local")
        for prompt, scope, session in (
            ([*KEPT, 1], "local", "kept"),
            ([*SHARED, 8], "local", None),
            ([*GONE, 1], "other", "gone"),
            ([*GONE, 1, 2, 3, 4], "local", "copy"),
        ):
            turn = replace(turn_of(prompt, [5, 6], scope=scope), since=before)
            result = store.commit_turn(turn)
            assert session in (None, result.session_id)
            assert result.new_session == (session is None)


def test_an_import_on_its_way_brings_nothing_back(root: Path) -> None:
    talk(root)
    with Store.open(root, ROW_IDENTITY) as store:
        before, history = store.deletions.watch(), store.history("gone")
        store.delete_session("gone")
        with pytest.raises(SessionDeleted):
            store.add_history(history, "local", before)
        assert [info.id for info in store.sessions()] == ["kept"]
        assert store.add_history(history, "local", store.deletions.watch()) == 2


def test_another_process_hears_of_it(root: Path) -> None:
    """Two models with one tokenizer: the chat that one is answering is deleted through the other; and
    through a third one whose tokenizer is another."""
    talk(root)
    broker = CatalogBroker(root)
    models = (ROW_IDENTITY, OTHER_MODEL, OTHER_TOKENIZER)
    with ExitStack() as closing:
        closing.callback(broker.close)
        stores = [
            closing.enter_context(
                Store.open(root, model, catalog_fd=broker.connect().socket.detach())
            )
            for model in models
        ]
        answering, beside, foreign = stores
        for name, delete in (("gone", beside.delete_session), ("kept", foreign.foreign.delete)):
            ids = answering.session_ids(name).tolist()
            before = answering.deletions.watch()
            delete(name)
            for turn in (turn_of([*ids, 1], [2, 3], session=name), turn_of([*ids, 1], [2, 3])):
                with pytest.raises(SessionDeleted):
                    answering.commit_turn(replace(turn, since=before))
        assert answering.sessions() == []
        foreign.gc()
        assert answering.nodes() == []
        assert found_in(root) == []


@pytest.mark.parametrize("name", ["gone", None])
def test_a_chat_that_begins_after_a_deletion_in_another_process(
    root: Path, name: str | None
) -> None:
    """Its process hears of the deletion only then, and the chat may have the same name, or begin alike."""
    talk(root)
    broker = CatalogBroker(root)
    with ExitStack() as closing:
        closing.callback(broker.close)
        answering, foreign = (
            closing.enter_context(
                Store.open(root, model, catalog_fd=broker.connect().socket.detach())
            )
            for model in (ROW_IDENTITY, OTHER_TOKENIZER)
        )
        foreign.foreign.delete("gone")
        begun = answering.deletions.watch()
        turn = turn_of([*GONE[:60], 1], [2, 3], session=name)
        assert answering.commit_turn(replace(turn, since=begun)).new_session


def test_what_another_model_has_of_it_goes(root: Path) -> None:
    """Rows, states and tokens of a conversation that is deleted and collected while a model of
    another tokenizer is served, and rows of another model of its own."""
    talk(root)
    with Store.open(root, OTHER_MODEL) as store:
        write_all(store, store.node(store.turns("gone")[0].reply_node))
    with Store.open(root, OTHER_TOKENIZER) as store:
        store.foreign.delete("gone")
        before = store.gc(dry_run=True)
        assert store.gc().segments == before.segments > 0
        assert found_in(root) == []
        assert store.verify().ok
    with Store.open(root, ROW_IDENTITY) as store:
        check_rows(store, store.node(store.turns("kept")[0].reply_node))
        assert len(list((root / "boundaries").iterdir())) == 1
        assert ids_of(store, "kept") == KEPT
        assert store.verify().ok


def test_rows_that_others_need_stay(root: Path) -> None:
    """The file with the shared beginning is written again without the rest, not given up."""
    talk(root)
    with Store.open(root, ROW_IDENTITY) as store:
        store.delete_session("gone")
        store.gc()
        assert found_in(root) == []
        leaf = store.node(store.turns("kept")[0].reply_node)
        assert check_rows(store, leaf) == len(SHARED)
        assert store.verify().ok


def test_rows_of_another_model_stay_unless_something_was_deleted(root: Path) -> None:
    """Its files end with tokens that nothing needs any more, and cannot be written again by this one."""
    talk(root)
    with Store.open(root, OTHER_MODEL) as store:
        for begun in (GONE[:60], KEPT):  # requests that were not answered
            prompt = np.array([*begun, 1, 2], np.int32)
            write_all(store, store.insert(prompt, "local", [len(prompt)])[-1])
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.gc().segments == 2
    with Store.open(root, OTHER_MODEL) as store:
        kept = store.node(store.turns("kept")[0].reply_node)
        assert check_rows(store, kept) == kept.p1


def test_without_room_rows_go_only_after_a_deletion(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that ends with tokens that nothing needs any more cannot be written again then."""

    def full(fd: int, offset: int, n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    talk(root)
    with Store.open(root, ROW_IDENTITY) as store:
        kept = store.node(store.turns("kept")[0].reply_node)
        prompt = np.array([*KEPT, 1, 2], np.int32)  # of a request that was not answered
        write_all(store, store.insert(prompt, "local", [len(prompt)])[-1])
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            assert store.gc().segments > 0
            assert check_rows(store, kept) == kept.p1
            store.delete_session("gone")
            store.gc()
        assert found_in(root) == []
        assert check_rows(store, kept) == 0


def test_what_a_running_request_still_needs_goes_with_the_next_gc(root: Path) -> None:
    """In the files of another model, too, although nothing was deleted since the gc before."""
    talk(root)
    with Store.open(root, OTHER_MODEL) as store:
        write_all(store, store.node(store.turns("gone")[0].reply_node))
    with Store.open(root, ROW_IDENTITY) as store:
        with store.hold(np.array(GONE, np.int32), "local") as running:
            running.match()
            store.delete_session("gone")
            store.gc()
            assert found_in(root)
        store.gc()
        assert found_in(root) == []


def test_what_was_set_aside_goes_with_a_deletion(root: Path) -> None:
    """A damaged catalog and its journal are kept for a month, with every conversation of then."""
    talk(root)
    shutil.copy(root / "catalog.sqlite", root / "quarantine" / "1-catalog.sqlite")
    with Store.open(root, ROW_IDENTITY) as store:
        for name in ("gone", "kept"):
            step = Invocation("local", "w", True, 1.0, "agent", name, 1, 1, 1, 1.0, 2.0, "end_turn")
            WorkflowTable(store.state).add([step])
        store.gc()
        assert list((root / "quarantine").iterdir())
        store.delete_session("gone")
        store.gc(dry_run=True)
        assert list((root / "quarantine").iterdir())
        store.gc()
        assert not list((root / "quarantine").iterdir())
        assert found_in(root) == []
        ((first, second),) = WorkflowTable(store.state).history()
        assert (first.session, second.session) == ("", "kept")


def test_words_that_only_the_deleted_chat_used_go(root: Path) -> None:
    """Of a tokenizer that was never served here, a store has the words of imported conversations."""
    talk(root)
    with Store.open(root, ROW_IDENTITY) as store:
        digest = store.foreign.enter(TokenizerIdentity("never served here"))
        for name in ("gone", "kept"):
            history = store.history(name)
            said = {id: (b"word %d" % id, b"") for id in history.stream.tolist()}
            words = KnownWords(some_words(1 << 24, said), b"8 bytes!", TokenizerIdentity("x"))
            store.vocabularies.add_words(digest, "local", words)
            store.foreign.add_history(history, "local", digest)
        store.foreign.delete("gone", tokenizer=digest.hex())
        store.gc()
        known = store.vocabularies.words(digest, "local").some()
        assert known.keys() == set(KEPT)
        assert store.vocabularies.read(digest, "local").text(np.array(KEPT[:1])) == "word 500"
        store.foreign.delete("kept", tokenizer=digest.hex())
        store.gc()
        assert not list((root / "tokenizers").glob("*.words"))
        assert len(store.sessions()) == 2


def test_words_that_cannot_be_read_now_stay(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without descriptors left does not take them for gone, and neither forgets nor replaces
    them; the next gc erases what this one could not."""
    talk(root)
    with Store.open(root, ROW_IDENTITY) as store:
        digest = store.foreign.enter(TokenizerIdentity("never served here"))
        said = {id: (b"word %d" % id, b"") for id in KEPT}
        words = KnownWords(some_words(1 << 24, said), b"8 bytes!", TokenizerIdentity("x"))
        store.vocabularies.add_words(digest, "local", words)
        store.foreign.add_history(store.history("kept"), "local", digest)
        store.delete_session("gone")

        def exhausted(files: object, path: Path, n_bytes_max: int | None = None) -> bytes:
            raise OSError(errno.EMFILE, "Too many open files", str(path))

        with monkeypatch.context() as patched:
            patched.setattr(PlainFiles, "read", exhausted)
            with pytest.raises(StoreError, match="Too many open files"):
                store.gc()
            with pytest.raises(StoreError, match="Too many open files"):
                store.vocabularies.add_words(
                    digest, "local", replace(words, vocabulary=some_words(1 << 24, {}))
                )
        store.gc()
        assert store.vocabularies.words(digest, "local").some() == said
        assert found_in(root) == []


def test_a_journal_that_could_not_be_rewritten(root: Path) -> None:
    """No room for the snapshot at the first gc: the next one has all of the work before it."""
    talk(root)
    with Store.open(root, ROW_IDENTITY) as store:
        store.delete_session("gone")
        n = read_chain(root / "journal").last
        in_the_way = [
            root / "journal" / f"{seq:016d}.snapshot.unfinished" for seq in range(n, n + 9)
        ]
        for path in in_the_way:
            path.mkdir()
        store.gc()
        assert found_in(root)
        for path in in_the_way:
            path.rmdir()
        store.gc()
        assert found_in(root) == []
