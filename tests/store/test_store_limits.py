"""Full disks, locks, directories that cannot be used."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from programs import run_python
from store_tools import ROW_IDENTITY, check_rows, make_hot, turn_of, write_all

from towerd.errors import DiskFull, StoreError, StoreLocked
from towerd.store import Store
from towerd.store.files.directory import StoreLock


def test_second_open_names_the_owner(root: Path, store: Store) -> None:
    """One process at a time; the message says which."""
    with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
        Store.open(root, ROW_IDENTITY)
    out = run_python(
        """
        import sys
        from pathlib import Path
        from store_tools import ROW_IDENTITY
        from towerd.errors import StoreLocked
        from towerd.store import Store
        try:
            Store.open(Path(sys.argv[1]), ROW_IDENTITY)
        except StoreLocked as error:
            print(error.message)
        """,
        str(root),
    )
    assert f"process {os.getpid()}" in out


def test_lock_is_released_by_close_and_by_failure(root: Path) -> None:
    """After close, and after an opening that failed, the store can be opened."""

    def fails(_: object) -> object:
        raise RuntimeError("no model")

    with pytest.raises(RuntimeError):
        Store.open(root, fails)  # type: ignore[arg-type]
    store = Store.open(root, ROW_IDENTITY)
    store.close()
    store.close()
    Store.open(root, ROW_IDENTITY).close()


def test_lock_that_a_full_disk_refuses(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes it cannot be noted: the store is not open, and can be opened once there is room."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="space"):
            StoreLock(root.with_name("lock"))
    lock = StoreLock(root.with_name("lock"))
    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(OSError, match="space"):
        lock.release()
    monkeypatch.undo()
    StoreLock(root.with_name("lock")).release()


def test_a_closed_store_says_so(store: Store) -> None:
    """No call reaches a closed catalog."""
    (leaf,) = store.insert(np.arange(3, dtype=np.int32), "local", [3])
    store.close()
    for call in (
        store.sessions,
        lambda: store.match(np.arange(3, dtype=np.int32), "a"),
        lambda: store.rows.write([leaf]),
    ):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    """A clear error, not a traceback."""
    (tmp_path / "store").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        Store.open(tmp_path / "store", ROW_IDENTITY)
    with pytest.raises(StoreError, match="cannot be used"):
        Store.open(tmp_path / "store" / "below", ROW_IDENTITY)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_directory(tmp_path: Path) -> None:
    """No permission is a StoreError too."""
    (tmp_path / "store").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="cannot be used"):
        Store.open(tmp_path / "store", ROW_IDENTITY)


def test_linked_parts_are_refused(tmp_path: Path) -> None:
    """Nothing below the store's directory may lead out of it."""
    (tmp_path / "store").mkdir()
    (tmp_path / "else").mkdir()
    (tmp_path / "store" / "segments").symlink_to(tmp_path / "else")
    with pytest.raises(StoreError, match="link"):
        Store.open(tmp_path / "store", ROW_IDENTITY)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "catalog.sqlite").symlink_to(tmp_path / "else" / "db")
    with pytest.raises(StoreError):
        Store.open(tmp_path / "two", ROW_IDENTITY)
    assert list((tmp_path / "else").iterdir()) == []


def test_leftovers_of_a_crash_are_swept(root: Path) -> None:
    """Temporary files go at opening, files that are in no catalog with gc."""
    Store.open(root, ROW_IDENTITY).close()
    (root / "tmp" / "half.twr").write_bytes(b"x" * 100)
    (root / "segments" / "orphan.twr").write_bytes(b"x" * 100)
    with Store.open(root, ROW_IDENTITY) as store:
        assert list((root / "tmp").iterdir()) == []
        assert (store.verify().ok, store.verify().orphans) == (True, 1)
        report = store.gc()
        assert (report.files, report.bytes_freed) == (1, 100)
        assert store.verify().orphans == 0


def test_meta_values(root: Path) -> None:
    """Small values for other modules, readable before the row identity is known."""
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.get_meta("k") is None
        store.set_meta("k", "1")
        store.set_meta("k", "2")
    seen = []

    def choose(catalog):  # type: ignore[no-untyped-def]
        seen.append(catalog.get_meta("k"))
        return catalog.row_identities()[0].row_identity

    with Store.open(root, choose) as store:
        assert seen == ["2"]
        assert store.state.row_identity == ROW_IDENTITY


def test_file_size_limit_is_a_full_disk(root: Path) -> None:
    """EFBIG while writing rows and while committing: DiskFull, and the acknowledged stays."""
    out = run_python(
        """
        import resource, sys
        from pathlib import Path
        import numpy as np
        from store_tools import ROW_IDENTITY, make_hot, turn_of
        from towerd.errors import DiskFull
        from towerd.store import Store
        store = Store.open(Path(sys.argv[1]), ROW_IDENTITY)
        first = store.commit_turn(turn_of(list(range(2000)), [1, 2]))
        make_hot(store, first.node)
        wal = (Path(sys.argv[1]) / "catalog.sqlite-wal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (wal + 20_000, -1))
        try:
            store.rows.write(first.node.path())
        except DiskFull as error:
            print("rows", error.status)
        n = 0
        try:
            for n in range(1000):
                store.commit_turn(turn_of([n, *range(500)], [1, 2], session=str(n)))
        except DiskFull as error:
            print("turn", error.status)
        store.check_integrity(keys=True)
        print("acknowledged", n)
        """,
        str(root),
    )
    assert out.startswith("rows 507\nturn 507\nacknowledged ")
    n = int(out.split()[-1])
    with Store.open(root, ROW_IDENTITY) as store:
        assert len(store.sessions()) == n + 1
        for number in range(n):
            assert store.session_ids(str(number)).tolist() == [number, *range(500), 1, 2]
        assert store.state.directory.names() == set()
        store.check_integrity(keys=True)
        assert store.verify().ok


@pytest.fixture
def small_disk(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A directory on a file system of 1 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def commit_until_full(store: Store) -> int:
    """How many turns were acknowledged before the disk was full."""
    for n in range(10_000):
        try:
            store.commit_turn(turn_of([7, n, *range(99)], [1], session="full"))
        except DiskFull:
            return n
    raise AssertionError("the disk never filled up")


def test_full_disk(small_disk: Path) -> None:
    """ENOSPC for real: writes fail cleanly, eviction still works, and then there is room."""
    with Store.open(small_disk / "store", ROW_IDENTITY) as store:
        first = store.commit_turn(turn_of(list(range(900)), [1, 2])).node
        write_all(store, first)
        with (small_disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
            while True:
                ballast.write(b"x" * 512)
        acknowledged = commit_until_full(store)
        file = first.file
        assert file is not None
        make_hot(store, first)
        store.check_integrity(keys=True)
        assert check_rows(store, first) == 901
        assert store.rows.drop_file(file) > 0
        assert first.file is None
        result = store.commit_turn(turn_of([8, 8], [1], session="after"))
        assert result.session_id == "after"
        store.check_integrity(keys=True)
    (small_disk / "ballast").unlink()
    with Store.open(small_disk / "store", ROW_IDENTITY) as store:
        assert store.session("after").n_turns == 1
        known = [info.id for info in store.sessions()]
        assert len(store.turns("full") if "full" in known else []) == acknowledged
        store.check_integrity(keys=True)


def test_rows_written_after_a_full_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that went while the catalog had no room leaves the catalog when its segment has another."""
    with Store.open(root, ROW_IDENTITY) as store:
        node = store.commit_turn(turn_of(list(range(50)), [1, 2])).node
        write_all(store, node)
        file = node.file
        assert file is not None
        with monkeypatch.context() as patched:
            patched.setattr(store.state.catalog, "run", _no_room)
            assert store.rows.drop_file(file) > 0
        write_all(store, node)
        store.check_integrity(keys=True)
    with Store.open(root, ROW_IDENTITY) as store:
        (info,) = store.sessions()
        assert check_rows(store, store.node(node.id)) == 51
        assert store.session_ids(info.id).tolist() == [*range(50), 1, 2]
        store.check_integrity(keys=True)


def _no_room(*_: object) -> int:
    raise DiskFull("no space left on device")


def test_descriptor_limit_is_enough_for_many_files(root: Path) -> None:
    """Thousands of files, few descriptors: macOS allows 256."""
    with Store.open(root, ROW_IDENTITY) as store:
        leaves = [store.insert(np.array([n, 1], np.int32), "local", [2])[-1] for n in range(150)]
        for leaf in leaves:
            write_all(store, leaf)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = max(int(name) for name in os.listdir("/dev/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 90, hard))
        try:
            for leaf in leaves:
                assert check_rows(store, leaf) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
