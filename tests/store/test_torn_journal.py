"""The catalog is lost, and with it some of what was not synced in the journal: what was synced is served."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from encrypted_stores import chain_of, encrypt
from simulate import simulate
from simulated_disk import SimulatedDisk, calls_to
from simulated_sqlite import sqlite_on
from store_tools import ROW_IDENTITY, check_rows, make_hot, turn_of
from ten_sessions import DATABASE, WAL, flip, remove

from towerd.codec import Codec
from towerd.cold import freeze, thaw, write_copy
from towerd.errors import DiskFull, StoreError, TokensLost
from towerd.store import FormatRequest, Store
from towerd.store.catalog.journal.frames import HEAD_BYTES
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.store.encryption.opening import is_encrypted
from towerd.store.rows.collect import collect

BOTH_KINDS = True
FIRST = list(range(30))
CUTS = 20
CODEC = Codec(KeptVocabulary([b"a"] * 40, [b""] * 40))


def branch(at: int, n: int = 10) -> list[int]:
    """The first tokens of FIRST, and others."""
    return [*FIRST[:at], *range(1000 * at, 1000 * at + n)]


def commit(store: Store, ids: list[int], name: str) -> None:
    store.commit_turn(turn_of(ids[:-1], ids[-1:], session=name))


def lost_once(root: Path, lost: Callable[[Store], object], then: Callable[[Store], object]) -> None:
    """FIRST is recorded, then `lost` and `then` happen, and the only copy of `lost` is damaged."""
    with Store.open(root, ROW_IDENTITY) as store:
        commit(store, FIRST, "first")
        store.flush()
        before = chain_of(root).last
        lost(store)
        after = chain_of(root).last
        assert after > before
        then(store)
    for record in chain_of(root).records:
        if before < record.seq <= after:
            flip(record.path, record.start + HEAD_BYTES + 5)
    remove(DATABASE)(root)


def test_a_segment_that_was_cut_twice(root: Path) -> None:
    """Of two branches the record of the upper one is lost: the lower one has nothing to stand on, and
    the conversation that both were cut out of is whole."""
    lost_once(
        root,
        lambda store: commit(store, branch(10), "upper"),
        lambda store: commit(store, branch(20), "lower"),
    )
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.session_ids("first").tolist() == FIRST
        with pytest.raises(TokensLost):
            store.session_ids("lower")
        assert [each for each in store.verify().problems if "has no tokens" not in each] == []
        commit(store, branch(20), "lower")
        assert store.session_ids("lower").tolist() == branch(20)


@pytest.mark.parametrize("is_cut", [False, True])
def test_what_was_wrong_with_the_journal(root: Path, is_cut: bool) -> None:
    """A record that a power cut left unwritten before a later one is told apart from one that is damaged."""
    with Store.open(root, ROW_IDENTITY) as store:
        commit(store, FIRST, "first")
        commit(store, branch(10), "second")
    lost = chain_of(root).records[-2]
    if is_cut:
        data = bytearray(lost.path.read_bytes())
        data[lost.start + 100 : lost.end] = bytes(lost.end - lost.start - 100)
        lost.path.write_bytes(data)
    else:
        flip(lost.path, lost.start + 100)
    with Store.open(root, ROW_IDENTITY) as store:
        (said,) = store.verify().recovered
        assert ("A power cut had cut it short" in said) == is_cut, said
        assert ("It was damaged" in said) != is_cut, said
        assert store.session_ids("first").tolist() == FIRST


def test_a_later_turn_is_lost(root: Path) -> None:
    """The conversation ends with the last turn that has its tokens, says so, and continues from there."""
    again = branch(20)
    lost_once(
        root,
        lambda store: commit(store, branch(10), "upper"),
        lambda store: commit(store, again, "first"),
    )
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.session_ids("first").tolist() == FIRST
        assert store.session("first").n_tokens == len(FIRST)
        assert any("1 turns without their tokens" in note for note in store.state.catalog.recovered)
        commit(store, [*FIRST, 7, 8], "first")
        assert store.session_ids("first").tolist() == [*FIRST, 7, 8]
        assert [each for each in store.verify().problems if "has no tokens" not in each] == []


def test_rows_of_a_segment_that_was_never_cut(root: Path) -> None:
    """They were written for the part below a cut whose record is lost: the store opens without them."""

    def write(store: Store) -> None:
        leaf = store.node(store.turns("first")[-1].reply_node)
        make_hot(store, leaf)
        store.rows.write(leaf.path())

    lost_once(root, lambda store: commit(store, branch(10), "upper"), write)
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.session_ids("first").tolist() == FIRST
        assert store.files() == []
        store.check_integrity(keys=True)
        assert store.verify().problems == ()


def collected(store: Store) -> None:
    with store.locked():
        collect(store.state, store.rows.bases, 0)


def test_a_deleted_conversation_that_returns(root: Path) -> None:
    """The record of its deletion is lost, that of the collection is not: it is back with all its tokens."""
    lost_once(root, lambda store: store.delete_session("first"), collected)
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.session_ids("first").tolist() == FIRST
        store.check_integrity(keys=True)


def after_cuts(
    root: Path, synced: Callable[[Store], object], then: Callable[[Store], object]
) -> Iterator[Store]:
    """A store in which `synced` was flushed when `then` began, after each of some power cuts at its
    end that took the catalog."""
    if is_encrypted(root):
        encrypt(root / "0")
    (root / "0").mkdir(parents=True, exist_ok=True)
    disk = SimulatedDisk(root / "0", None)
    with calls_to(disk), sqlite_on(disk), Store.open(root / "0", ROW_IDENTITY) as store:
        synced(store)
        store.flush()
        then(store)
        for seed in range(1, CUTS + 1):
            disk.after_cut(root / str(seed), random.Random(seed))
    for seed in range(1, CUTS + 1):
        for name in (DATABASE, WAL):
            (root / str(seed) / name).unlink(missing_ok=True)
        with Store.open(root / str(seed), ROW_IDENTITY) as store:
            yield store


def write_rows(store: Store) -> None:
    commit(store, FIRST, "first")
    leaf = store.node(store.turns("first")[-1].reply_node)
    make_hot(store, leaf)
    store.rows.write(leaf.path())


def reencode(store: Store) -> None:
    (file,) = store.files()
    assert store.rows.reencode(file, [FormatRequest(0, file.n_rows, "q6")]) is not None


def test_a_file_that_was_replaced(root: Path) -> None:
    """The journal names the file that is left."""
    for store in after_cuts(root, write_rows, reencode):
        (leaf,) = store.nodes()
        assert leaf.file is not None
        check_rows(store, leaf)


def frozen(store: Store) -> None:
    freeze(store, CODEC, "first", form="packed")


def thawed_and_continued(store: Store) -> None:
    thaw(store, CODEC, "first")
    commit(store, [*FIRST, 7, 8], "first")


def test_a_conversation_that_was_frozen(root: Path) -> None:
    """It has its tokens, or the blob that has them."""
    for store in after_cuts(root, lambda store: commit(store, FIRST, "first"), frozen):
        thaw(store, CODEC, "first")
        assert store.session_ids("first").tolist() == FIRST


def test_a_conversation_that_was_thawed(root: Path) -> None:
    """The turn that follows does not take its blob away from it."""

    def freeze_first(store: Store) -> None:
        commit(store, FIRST, "first")
        frozen(store)

    for store in after_cuts(root, freeze_first, thawed_and_continued):
        thaw(store, CODEC, "first")
        assert store.session_ids("first").tolist() in (FIRST, [*FIRST, 7, 8])


@contextmanager
def full_for_journal(root: Path) -> Iterator[None]:
    """The disk has no room for the records that are written inside the block."""
    write = os.write

    def refused(fd: int, data: bytes) -> int:
        logs = (root / "journal").glob("*.log")
        if any(os.path.samestat(os.fstat(fd), log.stat()) for log in logs):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    with patch("os.write", refused):
        yield


@contextmanager
def after_kill(store: Store, root: Path) -> Iterator[Store]:
    """The store as a process finds it after this one was killed and the catalog is lost."""
    copy = root.with_name("killed")
    shutil.copytree(root, copy)
    for name in (DATABASE, WAL):
        (copy / name).unlink()
    with Store.open(copy, ROW_IDENTITY) as killed:
        yield killed
    shutil.rmtree(copy)


def test_a_blob_that_the_journal_lacks(root: Path) -> None:
    """A conversation keeps its tokens until the journal has them in the blob, too."""
    with Store.open(root, ROW_IDENTITY) as store:
        commit(store, FIRST, "first")
        store.flush()
        with full_for_journal(root):
            assert write_copy(store, CODEC, "first", form="packed")
        with pytest.raises(DiskFull):
            freeze(store, CODEC, "first")
        commit(store, branch(10), "other")
        assert store.session("first").cold_bytes == 0
        with after_kill(store, root) as killed:
            assert killed.session_ids("first").tolist() == FIRST
        store.flush()
        assert freeze(store, CODEC, "first") is not None
        with after_kill(store, root) as killed:
            thaw(killed, CODEC, "first")
            assert killed.session_ids("first").tolist() == FIRST


def test_a_journal_that_is_removed(root: Path) -> None:
    """Nothing is frozen until it is written again."""
    with Store.open(root, ROW_IDENTITY) as store:
        commit(store, FIRST, "first")
        store.flush()
        shutil.rmtree(root / "journal")
        with pytest.raises(StoreError):
            frozen(store)
        assert store.session_ids("first").tolist() == FIRST
        store.flush()
        frozen(store)
        assert store.session("first").cold_bytes > 0


def test_a_thaw_that_the_journal_lacks(root: Path) -> None:
    """The turn that follows does not take the blob out of the journal."""
    with Store.open(root, ROW_IDENTITY) as store:
        commit(store, FIRST, "first")
        frozen(store)
        store.flush()
        with full_for_journal(root):
            thaw(store, CODEC, "first")
        commit(store, [*FIRST, 7, 8], "first")
        commit(store, branch(10), "other")
        with after_kill(store, root) as killed:
            thaw(killed, CODEC, "first")
            assert killed.session_ids("first").tolist() == FIRST
        store.flush()
        with after_kill(store, root) as killed:
            assert killed.session_ids("first").tolist() == [*FIRST, 7, 8]


def test_a_new_file_that_the_journal_lacks(root: Path) -> None:
    """The file that it replaces stays until the journal names the new one."""
    with Store.open(root, ROW_IDENTITY) as store:
        write_rows(store)
        store.flush()
        (before,) = store.files()
        with full_for_journal(root):
            reencode(store)
        assert before.path.exists()
        with after_kill(store, root) as killed:
            (leaf,) = killed.nodes()
            assert leaf.file is not None
            check_rows(killed, leaf)
        store.flush()
        assert not before.path.exists()
        (leaf,) = store.nodes()
        check_rows(store, leaf)


@pytest.mark.parametrize("seed", [522, 1215])
def test_seeds_of_the_simulation(seed: int) -> None:
    """A catalog that is lost beside a power cut."""
    failure, _ = simulate(seed)
    assert failure is None, failure.text()
