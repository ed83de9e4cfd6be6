"""Files of the media of sessions: kept with the turn, once for a tenant, through a lost catalog, until the session is deleted; and
never at the cost of a turn or of the disk's limit."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crash import killed_after
from encrypted_stores import KINDS, key_of
from store_tools import ROW_IDENTITY, turn_of

from towerd.errors import DiskLimitReached, InvalidRequest
from towerd.store import Store
from towerd.store.catalog.sqlite import SqliteCatalog
from towerd.store.sessions.media import FILE_BYTES_MAX, SentMedium

ONE, OTHER = (SentMedium(bytes([n]) * 16, b"picture %d " % n * 999) for n in (1, 2))
AGAIN = replace(ONE, key=bytes(16), ordinal=1)
"""The second of the media that are made of the same file."""


def commit(
    store: Store,
    tokens: list[int],
    *media: SentMedium,
    session: str = "seen",
    scope: str = "local",
) -> None:
    turn = turn_of(tokens, [4], session=session, scope=scope)
    store.commit_turn(replace(turn, media=media))


def row_of(store: Store, session: str = "seen", scope: str = "local") -> int:
    row = store.media.session(session, scope)
    assert row is not None
    return row


def files(root: Path) -> list[Path]:
    return sorted((root / "media").iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_media_are_kept_with_their_turns(kind: str, tmp_path: Path) -> None:
    """Each once, also after the loss of the catalog; one that is too large not at all."""
    root = tmp_path / "store"
    root.mkdir()
    KINDS[kind](root)
    huge = SentMedium(bytes([3]) * 16, bytes(FILE_BYTES_MAX + 1))
    with Store.open(root, ROW_IDENTITY) as store:
        commit(store, [1], ONE, huge, AGAIN)
        commit(store, [1, 4, 2], ONE, OTHER, AGAIN)
        commit(store, [7], OTHER, session="other")
    for is_lost in (False, True):
        if is_lost:
            (root / "catalog.sqlite").unlink()
        assert len(files(root)) == 2
        with Store.open(root, ROW_IDENTITY) as store:
            table, row = store.media, row_of(store)
            assert table.keys(row) == {ONE.key, OTHER.key, AGAIN.key}
            assert [table.file(row, each.key) for each in (ONE, OTHER, AGAIN)] == [
                ONE.file,
                OTHER.file,
                ONE.file,
            ]
            entry = table.entry(row, AGAIN.key)
            assert entry is not None
            assert (entry.ordinal, entry.n_bytes) == (1, len(ONE.file))
            assert table.keys(row_of(store, "other")) == {OTHER.key}
            assert table.session("seen", "tenant:other") is None
            assert (
                table.session("seen", "local", store.state.identity.tokenizer_digest.hex()) == row
            )
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
        for each in (ONE, OTHER):
            assert store.media.file(row_of(store), each.key) == each.file


def test_a_deleted_session_takes_its_media(tmp_path: Path) -> None:
    """Their files go at once, unless another session has them; what a crash left behind goes with the next gc."""
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        commit(store, [1], ONE, OTHER)
        commit(store, [7], OTHER, session="other")
        deleted = row_of(store)
        store.delete_session("seen")
        assert store.media.keys(deleted) == set()
        (left,) = files(tmp_path)
        assert left.read_bytes() == OTHER.file
        store.delete_session("other")
        assert files(tmp_path) == []
        (tmp_path / "media" / "orphan").write_bytes(b"x" * 999)
        assert store.verify().orphans == 1
        would, nothing = store.gc(dry_run=True), store.gc(dry_run=True, quarantine_days=99)
        assert (would.files, would.bytes_freed) == (nothing.files, nothing.bytes_freed) == (1, 999)
        done = store.gc()
        assert (done.files, done.bytes_freed) == (1, 999)
        assert files(tmp_path) == []
        assert store.verify().ok


def test_what_fails_leaves_no_file(tmp_path: Path) -> None:
    """One that another session has stays."""
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        commit(store, [1], ONE)
        session, bad = store.history("seen"), store.media.written([ONE, OTHER], "local")
        with pytest.raises(InvalidRequest), bad as kept:
            store.add_history(replace(session, id=f"{len(files(tmp_path))}\n"), "local", None, kept)
        assert [path.read_bytes() for path in files(tmp_path)] == [ONE.file]


def test_tenants_share_no_file(tmp_path: Path) -> None:
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        for tenant in ("tenant:ann", "tenant:bob"):
            commit(store, [1], ONE, scope=tenant)
            commit(store, [7], ONE, scope=tenant, session="other")
        assert len(files(tmp_path)) == 2
        store.delete_session("seen", "tenant:ann")
        store.delete_session("other", "tenant:ann")
        assert len(files(tmp_path)) == 1
        assert store.media.file(row_of(store, scope="tenant:bob"), ONE.key) == ONE.file


def test_what_is_damaged_is_told_and_kept_when_it_is_sent_again(tmp_path: Path) -> None:
    """One that is gone at once, one whose content changed after `verify --repair`."""
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        commit(store, [1], ONE)
        for damage in (Path.unlink, lambda path: path.write_bytes(bytes(len(ONE.file)))):
            (path,) = files(tmp_path)
            damage(path)
            assert store.media.file(row_of(store), ONE.key) is None
            (problem,) = store.verify().problems
            assert problem == f"media/{path.name}: a picture or sound is damaged or missing"
            if path.exists():
                assert store.verify(repair=True).quarantined == 1
                assert (tmp_path / "quarantine" / path.name).exists()
            commit(store, [1, 4, 2], ONE)
            assert store.media.file(row_of(store), ONE.key) == ONE.file
            assert store.verify().ok


def test_media_are_encrypted_with_their_store(tmp_path: Path) -> None:
    """Those that were there before, too."""
    root = tmp_path / "store"
    with Store.open(root, ROW_IDENTITY) as store:
        commit(store, [1], ONE)
    with Store.open(root, ROW_IDENTITY, encrypt=key_of(root)) as store:
        commit(store, [1, 4, 2], OTHER)
        assert len(files(root)) == 2
        for path in files(root):
            assert b"picture" not in path.read_bytes()
        assert store.media.file(row_of(store), ONE.key) == ONE.file
        assert store.verify().ok


def test_what_a_killed_import_left_leaves_first(tmp_path: Path) -> None:
    """No picture of a session has to, where the room of those that no session has is enough."""
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        commit(store, [1], ONE)
        for n in range(4):
            (tmp_path / "media" / f"{n:032x}").write_bytes(os.urandom(1 << 20))
        (tmp_path / "notes").write_bytes(bytes(4 << 20))
        store.disk.bytes_max = 8 << 20
        store.disk.check()
        assert [path.read_bytes() for path in files(tmp_path)] == [ONE.file]
        assert store.media.file(row_of(store), ONE.key) == ONE.file


def test_a_file_that_is_being_removed_is_not_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a turn that finds it while the only session that has it is being deleted."""
    is_removing, is_seen = threading.Event(), threading.Event()
    begin, unlink, stat = SqliteCatalog.begin_file, Path.unlink, Path.stat
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        commit(store, [1], ONE)
        (shared,) = files(tmp_path)
        deleting = threading.Thread(target=store.delete_session, args=("seen",))

        def begun(catalog: SqliteCatalog, name: str) -> None:
            if name == shared.name:
                can_be_removed = not is_locked(store)
                deleting.start()
                assert not can_be_removed or is_removing.wait(9)
            begin(catalog, name)

        def unlinked(path: Path, missing_ok: bool = False) -> None:
            if path == shared:
                is_removing.set()
                is_seen.wait(9)  # the turn has found it meanwhile
            unlink(path, missing_ok)

        def seen(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
            found = stat(path, follow_symlinks=follow_symlinks)
            if path == shared and threading.current_thread() is threading.main_thread():
                is_seen.set()
            return found

        monkeypatch.setattr(SqliteCatalog, "begin_file", begun)
        monkeypatch.setattr(Path, "unlink", unlinked)
        monkeypatch.setattr(Path, "stat", seen)
        commit(store, [9], ONE, session="other")
        deleting.join()
        assert store.media.file(row_of(store, "other"), ONE.key) == ONE.file


def is_locked(store: Store) -> bool:
    """Whether the calling thread keeps others from the store's lock."""
    lock: Any = store.state.catalog.lock  # an RLock, of which the catalog shows less
    free: list[bool] = []

    def probe() -> None:
        if lock.acquire(blocking=False):
            lock.release()
            free.append(True)

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    return not free


def test_a_file_stays_for_each_turn_that_relies_on_it(tmp_path: Path) -> None:
    """Though another one, which relied on it too, has ended; nothing trims it, and no repair."""
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        commit(store, [1], ONE)
        commit(store, [1, 4, 2], OTHER)
        path = next(path for path in files(tmp_path) if path.read_bytes() == ONE.file)
        with store.media.written([ONE], "local") as kept:
            with store.media.written([ONE], "local"):
                pass
            store.media.trim(1)
            assert files(tmp_path) == [path]
            path.write_bytes(bytes(len(ONE.file)))
            assert store.verify(repair=True).quarantined == 0
            path.write_bytes(ONE.file)
            store.delete_session("seen")
            assert files(tmp_path) == [path]
            assert [each.name for each in kept] == [path.name]
        store.gc()
        assert files(tmp_path) == []


def test_requests_at_the_limit_trim_once(tmp_path: Path) -> None:
    """What is lacking, not each of them all of it."""
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        for n in range(6):
            commit(store, [n + 1], SentMedium(bytes([n]) * 16, os.urandom(1 << 20)), session=str(n))
        limit, together = store.disk, threading.Barrier(4)
        limit.bytes_max = (limit.use().text + limit.use().media - (1 << 19)) * 16 // 15

        def trim(n_bytes: int) -> None:
            with suppress(threading.BrokenBarrierError):
                together.wait(1)  # for others that trim now, of which there are none
            store.media.trim(n_bytes)

        limit.media_leave_by(trim)
        requests = [threading.Thread(target=limit.check) for _ in range(4)]
        for each in requests:
            each.start()
        for each in requests:
            each.join()
        assert len(files(tmp_path)) == 5


def test_what_left_since_the_last_look_is_not_trimmed(tmp_path: Path) -> None:
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        commit(store, [1], ONE)
        (tmp_path / "notes").write_bytes(bytes(8 << 20))
        store.disk.bytes_max = 8 << 20
        store.disk.use()
        (tmp_path / "notes").unlink()
        store.disk.check()
        assert [path.read_bytes() for path in files(tmp_path)] == [ONE.file]


def test_media_leave_before_a_turn_is_refused(tmp_path: Path) -> None:
    """The oldest first, when text needs the room of the limit; one for which there is none is not kept, but its turn is."""
    large = [SentMedium(bytes([n]) * 16, os.urandom(1 << 20)) for n in range(3)]
    with Store.open(tmp_path, ROW_IDENTITY) as store:
        store.disk.bytes_max = 8 << 20
        for n, each in enumerate(large):
            commit(store, [n + 1], each, session=str(n))
        (tmp_path / "notes").write_bytes(bytes(5 << 20))
        store.disk.make_room(0)  # looks again
        store.disk.check()
        kept = [bool(store.media.keys(row_of(store, str(n)))) for n in range(3)]
        assert kept == sorted(kept) != [True] * 3
        (tmp_path / "more").write_bytes(bytes(8 << 20))
        store.disk.make_room(0)
        with pytest.raises(DiskLimitReached):
            store.disk.check()
        assert files(tmp_path) == []
        commit(store, [9], large[0], session="late")
        assert files(tmp_path) == []
        assert store.session_ids("late").tolist() == [9, 4]
