"""What clients sent for the media of sessions: kept with the turn, once, through a lost catalog, and until the session is deleted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from crash import killed_after
from encrypted_stores import KINDS, key_of
from store_tools import ROW_IDENTITY, turn_of

from towerd.store import Store
from towerd.store.sessions.media import FILE_BYTES_MAX, SentMedium

ONE, OTHER = (SentMedium(bytes([n]) * 16, b"picture %d " % n * 999) for n in (1, 2))


def commit(store: Store, tokens: list[int], *media: SentMedium, session: str = "seen") -> None:
    store.commit_turn(replace(turn_of(tokens, [4], session=session), media=media))


def row_of(store: Store, session: str = "seen") -> int:
    row = store.media.session(session, "local")
    assert row is not None
    return row


@pytest.mark.parametrize("kind", KINDS)
def test_media_are_kept_with_their_turns(kind: str, tmp_path: Path) -> None:
    """Each once, also after the loss of the catalog; one that is too large not at all."""
    root = tmp_path / "store"
    root.mkdir()
    KINDS[kind](root)
    huge = SentMedium(bytes(16), bytes(FILE_BYTES_MAX + 1))
    with Store.open(root, ROW_IDENTITY) as store:
        commit(store, [1], ONE, huge)
        commit(store, [1, 4, 2], ONE, OTHER, session="seen")
        commit(store, [7], OTHER, session="other")
    for is_lost in (False, True):
        if is_lost:
            (root / "catalog.sqlite").unlink()
            assert len(list((root / "media").iterdir())) == 3
        with Store.open(root, ROW_IDENTITY) as store:
            assert store.media.keys(row_of(store)) == {ONE.key, OTHER.key}
            assert store.media.keys(row_of(store, "other")) == {OTHER.key}
            assert list(store.media.files(row_of(store), OTHER.key)) == [OTHER.file, ONE.file]
            assert store.media.file(row_of(store, "other"), ONE.key) is None
            assert store.media.session("seen", "tenant:other") is None
            assert store.verify().ok


def test_a_kill_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    """The picture of a turn that is durable is durable."""
    root = tmp_path / "store"

    def work() -> None:
        store = Store.open(root, ROW_IDENTITY)
        commit(store, [1], ONE)
        commit(store, [1, 4, 2], OTHER)

    killed_after(work)
    with Store.open(root, ROW_IDENTITY) as store:
        assert list(store.media.files(row_of(store), ONE.key)) == [ONE.file, OTHER.file]


def test_a_deleted_session_takes_its_media(tmp_path: Path) -> None:
    """Nothing of them is in a file after the next gc; another session keeps its own."""
    root = tmp_path / "store"
    with Store.open(root, ROW_IDENTITY) as store:
        commit(store, [1], ONE)
        commit(store, [7], OTHER, session="other")
        deleted = row_of(store)
        store.delete_session("seen")
        assert store.media.keys(deleted) == set()
        assert store.gc().bytes_freed >= len(ONE.file)
        assert store.media.file(row_of(store, "other"), OTHER.key) == OTHER.file
        for path in root.rglob("*"):
            assert not path.is_file() or ONE.file[:50] not in path.read_bytes(), path
        assert store.verify().ok


def test_a_damaged_file_is_told_and_not_served(tmp_path: Path) -> None:
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        commit(store, [1], ONE)
        (path,) = (tmp_path / "media").iterdir()
        path.write_bytes(path.read_bytes().replace(b"picture", b"pictura", 1))
        assert store.media.file(row_of(store), ONE.key) is None
        assert store.verify().problems == (
            f"media/{path.name}: a picture or sound is damaged or missing",
        )
        path.unlink()
        assert store.media.file(row_of(store), ONE.key) is None
        assert not store.verify().ok


def test_media_are_encrypted_with_their_store(tmp_path: Path) -> None:
    """Those that were there before, too."""
    root = tmp_path / "store"
    with Store.open(root, ROW_IDENTITY) as store:
        commit(store, [1], ONE)
    with Store.open(root, ROW_IDENTITY, encrypt=key_of(root)) as store:
        commit(store, [1, 4, 2], OTHER)
        for path in (root / "media").iterdir():
            assert b"picture" not in path.read_bytes()
        assert list(store.media.files(row_of(store), OTHER.key)) == [OTHER.file, ONE.file]
        assert store.verify().ok
