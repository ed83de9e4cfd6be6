"""The catalog and its journal, damaged one at a time, both, or lost: every token is there."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from encrypted_stores import KINDS, page_of
from store_tools import OTHER_TOKENIZER, ROW_IDENTITY, turn_of
from ten_sessions import (
    DATABASE,
    MARK,
    N_SESSIONS,
    WAL,
    Damage,
    check,
    check_open,
    closed,
    committed_and_killed,
    flip,
    flip_in,
    flip_index,
    flips,
    ids_bytes,
    log_of,
    populate,
    remove,
    tokens,
    write,
)

from towerd.errors import NotFound, StoreError, StoreVersion, TokensLost
from towerd.store import Store
from towerd.store.catalog.journal.journal import read_chain
from towerd.store.catalog.sqlite import SqliteCatalog
from towerd.store.encryption.opening import is_encrypted

AFTER_A_KILL: dict[str, Damage] = {
    "a bit of the first frame of the WAL": lambda root: flip(root / WAL, 32 + 24 + 100),
    "a bit of the WAL's head": lambda root: flip(root / WAL, 17),
    "a bit in the middle of the WAL": lambda root: flip(
        root / WAL, (root / WAL).stat().st_size // 2
    ),
    "half of the WAL": write(WAL, None),
    "the WAL": remove(WAL),
    "the catalog but not its WAL": remove(DATABASE),
    "the catalog and its WAL": remove(DATABASE, WAL),
    "the catalog's content": write(DATABASE, b""),
}
AFTER_A_STOP: dict[str, Damage] = {
    "a value in meta": flip_in(DATABASE, MARK.encode()),
    "an entry of an index": flip_index("sessions_id"),
    "a turn's tail": flip_in(DATABASE, ids_bytes(tokens(4)[-1:])),
    "a segment's tokens": flip_in(DATABASE, ids_bytes(tokens(4)[81:88])),
    "a title": flip_in(DATABASE, b"A title"),
    "a session's name": flip_in(DATABASE, b"session-7"),
    "the schema": flip_in(DATABASE, b"CREATE INDEX turns_session"),
    "a row identity": flip_in(DATABASE, b'"arch":"llama"'),
    "the catalog": remove(DATABASE),
    "the catalog's content": write(DATABASE, b""),
    "half of the catalog": write(DATABASE, None),
    "the catalog replaced by garbage": write(DATABASE, b"garbage " * 1000),
    "the schema version": flips(DATABASE, 63, (3, 2)),
    "whose database it is": lambda root: flip(root / DATABASE, 70),
}
AFTER_A_STOP_ENCRYPTED: dict[str, Damage] = {
    "the first page": lambda root: flip(root / DATABASE, 100),
    "the checksum of the first page": lambda root: flip(root / DATABASE, 4096 - 10),
    "a page of turns": lambda root: flip(root / DATABASE, page_of("turns", root) + 1000),
    "a page of the index": lambda root: flip(root / DATABASE, page_of("sessions_id", root) + 20),
    "the last page": lambda root: flip(root / DATABASE, (root / DATABASE).stat().st_size - 100),
    "the catalog": remove(DATABASE),
    "the catalog's content": write(DATABASE, b""),
    "half of the catalog": write(DATABASE, None),
    "the catalog replaced by garbage": write(DATABASE, b"garbage " * 1000),
    "the catalog replaced by a plain one": lambda root: plain_catalog(root / DATABASE),
}
both_kinds = pytest.mark.parametrize("root", KINDS, indirect=True)


def plain_catalog(path: Path) -> None:
    other = path.parent.with_name("other")
    other.mkdir()
    SqliteCatalog(other / path.name).close()
    os.replace(other / path.name, path)


@both_kinds
@pytest.mark.parametrize("damage", AFTER_A_KILL)
def test_damage_after_a_kill_loses_nothing(
    root: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns that were in the WAL alone are taken from the journal, and the log says so."""
    committed_and_killed(root)
    AFTER_A_KILL[damage](root)
    check(root)
    assert "from its journal" in caplog.text


@pytest.mark.parametrize(
    ("root", "damage"),
    [("plain", each) for each in AFTER_A_STOP.values()]
    + [("encrypted", each) for each in AFTER_A_STOP_ENCRYPTED.values()],
    ids=[*AFTER_A_STOP, *(f"encrypted: {each}" for each in AFTER_A_STOP_ENCRYPTED)],
    indirect=["root"],
)
def test_damage_after_a_clean_stop_loses_nothing(
    root: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever was damaged, nothing of it is served; the damaged file is kept aside."""
    closed(root)
    before = (root / DATABASE).read_bytes()
    damage(root)
    damaged = (root / DATABASE).read_bytes() if (root / DATABASE).exists() else None
    assert damaged != before
    check(root)
    assert "rebuilt from its journal" in caplog.text
    aside = [path.read_bytes() for path in (root / "quarantine").iterdir()]
    assert damaged is None or damaged in aside
    check(root)
    assert caplog.text.count("rebuilt") == 1


def halve_journal(root: Path) -> None:
    for path in (root / "journal").iterdir():
        write(f"journal/{path.name}", None)(root)


JOURNAL: dict[str, Damage] = {
    "deleted": remove("journal"),
    "every file cut in half": halve_journal,
    "a bit": lambda root: flip(log_of(root), 5000),
    "garbage": lambda root: write(f"journal/{log_of(root).name}", b"x" * 999)(root),
}


@both_kinds
@pytest.mark.parametrize("stop", [closed, committed_and_killed])
@pytest.mark.parametrize("damage", JOURNAL)
def test_a_damaged_journal_is_written_anew(root: Path, damage: str, stop: Damage) -> None:
    """The catalog is whole: the journal comes from it, and then guards it again."""
    stop(root)
    JOURNAL[damage](root)
    check(root)
    remove(DATABASE)(root)
    check(root)


@both_kinds
def test_both_damaged_at_different_turns(root: Path) -> None:
    """What is in either of them is kept."""
    closed(root)
    if is_encrypted(root):  # all of a page is lost with a bit of it
        flip(root / DATABASE, page_of("tokenizers", root) + 99)
        flip(root / DATABASE, page_of("fingerprints", root) + 99)
    else:
        flip_in(DATABASE, ids_bytes(tokens(4)[-1:]))(root)
        flip_in(DATABASE, ids_bytes(tokens(6)[81:88]))(root)
    log = log_of(root)
    flip(log, log.stat().st_size // 5)
    check(root)
    remove(DATABASE)(root)
    check(root)


def test_what_neither_has_is_an_error_and_never_other_tokens(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A turn lost in both is not served, and nothing else suffers."""
    closed(root)
    with Store.open(root, ROW_IDENTITY) as store:
        ids = tokens(N_SESSIONS)
        store.commit_turn(turn_of(ids[:80], ids[80:], session="lost"))
    flip_in(DATABASE, ids_bytes(ids[81:88]))(root)
    log = log_of(root)
    flip(log, log.stat().st_size - 300)
    with Store.open(root, ROW_IDENTITY) as store:
        assert len(store.sessions()) == N_SESSIONS + 1
        for session in range(N_SESSIONS):
            assert store.session_ids(f"session-{session}").tolist() == tokens(session)
        for read in (store.session_ids, store.history):
            with pytest.raises(TokensLost, match="'lost' lost tokens"):
                read("lost")
        assert "1 turns without their tokens" in caplog.text
        store.commit_turn(turn_of(ids[:80], ids[80:], session="lost"))
        assert store.session_ids("lost").tolist() == ids


@both_kinds
def test_a_missing_catalog_without_a_journal_is_no_empty_store(root: Path) -> None:
    """Beside segment files it is an error that says what to do; nothing is made."""
    closed(root)
    remove(DATABASE, "journal")(root)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"missing.*put a backup"):
            Store.open(root, ROW_IDENTITY)
        assert not (root / DATABASE).exists()


@both_kinds
def test_a_damaged_catalog_without_a_journal_is_refused(root: Path) -> None:
    """It is left as it is, with an error that says what to do."""
    closed(root)
    remove("journal")(root)
    write(DATABASE, b"garbage " * 1000)(root)
    with pytest.raises(StoreError, match="put a backup in its place"):
        Store.open(root, ROW_IDENTITY)
    assert (root / DATABASE).read_bytes() == b"garbage " * 1000


def test_another_stores_journal_is_refused(root: Path, tmp_path: Path) -> None:
    """Whichever counted, the conversations of the other one would be gone. Without it the catalog
    has a journal of its own again."""
    closed(root)
    with Store.open(tmp_path / "other", ROW_IDENTITY) as store:
        for n in range(100):
            store.commit_turn(turn_of([n, 1, 2], [3], session=str(n)))
    remove("journal")(root)
    shutil.copytree(tmp_path / "other" / "journal", root / "journal")
    with pytest.raises(StoreError, match="different stores"):
        Store.open(root, ROW_IDENTITY)
    assert read_chain(root / "journal").records
    remove("journal")(root)
    check(root)
    remove(DATABASE)(root)
    check(root)


@both_kinds
def test_an_older_copy_of_the_catalog_is_brought_up_to_date(root: Path) -> None:
    """A backup in its place loses nothing that was said since."""
    with Store.open(root, ROW_IDENTITY) as store:
        store.commit_turn(turn_of([1, 2, 3], [4], session="gone"))
    older = (root / DATABASE).read_bytes()
    with Store.open(root, ROW_IDENTITY) as store:
        store.delete_session("gone")
        populate(store)
        store.gc()
    (root / DATABASE).write_bytes(older)
    check(root)


@pytest.mark.parametrize("kind", KINDS)
def test_random_bits_of_the_catalog(tmp_path: Path, kind: str) -> None:
    """Wherever up to 20 bits flip, every session is exact, or opening is an error."""
    for name, stop in (("closed", closed), ("killed", committed_and_killed)):
        KINDS[kind](tmp_path / name)
        stop(tmp_path / name)
    for seed in range(120):
        rng, root = random.Random(seed), tmp_path / "store"
        shutil.copytree(tmp_path / ("closed", "killed")[seed % 2], root)
        for _ in range(rng.choice((1, 1, 3, 20))):
            path = rng.choice([p for p in (root / DATABASE, root / WAL) if p.exists()])
            flip(path, rng.randrange(path.stat().st_size), rng.randrange(8))
        try:
            check(root)
        except StoreVersion as error:
            assert "use a newer towerd" in error.message, f"seed {seed}"  # noqa: PT017
        shutil.rmtree(root)


@pytest.mark.parametrize("kind", KINDS)
def test_random_bits_of_both(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Never other tokens, and nothing is missing without a word."""
    KINDS[kind](tmp_path / "closed")
    closed(tmp_path / "closed")
    for seed in range(60):
        rng, root = random.Random(seed), tmp_path / "store"
        shutil.copytree(tmp_path / "closed", root)
        caplog.clear()
        for path in (root / DATABASE, *(root / "journal").iterdir()):
            flip(path, rng.randrange(path.stat().st_size), rng.randrange(8))
        try:
            check_what_is_there(root, caplog)
        except StoreVersion as error:
            assert "use a newer towerd" in error.message, f"seed {seed}"  # noqa: PT017
        shutil.rmtree(root)


def check_what_is_there(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Store.open(root, ROW_IDENTITY) as store:
        for session in range(N_SESSIONS):
            whole, found = tokens(session), None
            with suppress(NotFound, TokensLost):
                found = store.session_ids(f"session-{session}").tolist()
            assert found == whole or "lost:" in caplog.text
            assert found in (None, whole, whole[:70])
        assert all("has no tokens" in problem for problem in store.verify().problems)


@both_kinds
def test_another_models_sessions_are_recovered_too(root: Path) -> None:
    """The journal has all models of the store."""
    closed(root)
    with Store.open(root, OTHER_TOKENIZER) as store:
        store.commit_turn(turn_of([1, 2, 3], [4], session="other"))
    remove(DATABASE)(root)
    with Store.open(root, OTHER_TOKENIZER) as store:
        assert store.session_ids("other").tolist() == [1, 2, 3, 4]
    with Store.open(root, ROW_IDENTITY) as store:
        check_open(store)
