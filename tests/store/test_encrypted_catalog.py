"""The catalog and the journal of an encrypted store: what their files tell, encrypting them, and renewing their key."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from crash import killed_after, killed_at
from encrypted_stores import chain_of, connect, encrypt, key_of, page_of, vault_of
from programs import SUPPORT, run_python
from simulated_disk import PowerLost, SimulatedDisk, calls_to
from simulated_sqlite import sqlite_on
from store_tools import OTHER_MODEL, ROW_IDENTITY, turn_of
from ten_sessions import (
    DATABASE,
    MARK,
    WAL,
    check,
    closed,
    committed_and_killed,
    flip,
    ids_bytes,
    log_of,
    populate,
    remove,
    tokens,
)

from towerd.errors import ConfigError, StoreError
from towerd.store import Store
from towerd.store.catalog.shared.broker import CatalogBroker
from towerd.store.maintenance.renewal import keys_renewed

CUTS = 30
TENANT = "a-tenant-of-this-name"
TOLD = (MARK.encode(), b"session-", b"A title", TENANT.encode(), ids_bytes(tokens(4)[81:85]))
"""What must be in no file: a value, names, a tenant, and tokens."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory if that can be had: a killed process loses nothing there either."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
        yield Path(made)


def open_encrypted(root: Path) -> Store:
    return Store.open(root, ROW_IDENTITY, encrypt=key_of(root))


def telling(root: Path) -> list[Path]:
    """The files that have some of TOLD."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return [path for path in files if any(told in path.read_bytes() for told in TOLD)]


def populate_more(store: Store) -> None:
    populate(store)
    store.commit_turn(turn_of([1, 2, 3], [4], session="session-x", scope=TENANT))
    store.delete_session("session-x", TENANT)


def test_no_file_tells_anything(root: Path) -> None:
    """Neither of a killed process, with all of it in the WAL and the log, nor of a closed store."""
    killed_after(lambda: populate_more(open_encrypted(root)))
    assert (root / WAL).stat().st_size > 100_000
    assert telling(root) == []
    check(root)
    with Store.open(root, ROW_IDENTITY) as store:
        store.gc()
        assert telling(root) == []
    assert telling(root) == []
    check(root)


@pytest.mark.parametrize("stop", [closed, committed_and_killed])
def test_a_store_with_content_is_encrypted(root: Path, stop: Callable[[Path], None]) -> None:
    """Nothing is lost, nothing is left that could be read, and each copy still repairs the other."""
    stop(root)
    (root / "search.sqlite").write_bytes(b"session-")
    (root / "quarantine" / f"1-{DATABASE}").write_bytes(b"session-")
    assert telling(root)
    open_encrypted(root).close()
    assert telling(root) == []
    assert not (root / "plain").exists()
    assert not chain_of(root).is_plain
    for name in (DATABASE, "journal"):
        check(root)
        remove(name)(root)
    check(root)


def test_a_damaged_store_is_encrypted(root: Path) -> None:
    """It is repaired first."""
    closed(root)
    flip(root / DATABASE, 0)
    open_encrypted(root).close()
    assert telling(root) == []
    check(root)


def test_what_is_overwritten(root: Path) -> None:
    """Not only the names of the plain files go, but their bytes: who still has them open reads zeros."""
    closed(root)
    files = [(root / DATABASE).open("rb"), log_of(root).open("rb")]
    open_encrypted(root).close()
    for file in files:
        with file:
            assert set(file.read()) == {0}


def killed_anywhere(
    folder: Path, before: Callable[[Path], None], step: Callable[[Path], None]
) -> Iterator[Path]:
    """A store after `before` and, each time killed a call or a few later, `step`."""
    before(folder / "before")
    number, was_killed = 0, True
    while was_killed:
        number += 1 + number // 40
        root = folder / "store"
        shutil.copytree(folder / "before", root)
        was_killed = killed_at(number, lambda root=root: step(root))  # type: ignore[misc]
        yield root
        shutil.rmtree(root)
        (folder / "store.key").unlink(missing_ok=True)
    assert number > 20


def test_encrypting_is_killed_anywhere(folder: Path) -> None:
    """The next start continues, and loses nothing; the journal alone has everything, too."""
    for root in killed_anywhere(
        folder, committed_and_killed, lambda each: open_encrypted(each).close()
    ):
        open_encrypted(root).close()
        assert telling(root) == []
        assert not (root / "plain").exists()
        check(root)
        remove(DATABASE)(root)
        check(root)


@pytest.mark.parametrize("what", ["encrypting", "renewing"])
def test_power_cuts(folder: Path, what: str) -> None:
    """Whatever a disk has kept of a store that was being encrypted, or its key renewed, nothing is lost."""
    before = folder / "0"
    if what == "encrypting":
        committed_and_killed(before)
    else:
        encrypted_and_killed(before)
    for seed in range(1, CUTS + 1):
        rng = random.Random(seed)
        shutil.copytree(before, folder / "cut")
        disk = SimulatedDisk(folder / "cut", rng.randint(1, 352))
        with suppress(PowerLost, StoreError), calls_to(disk), sqlite_on(disk):
            if what == "encrypting":
                Store.open(disk.root, ROW_IDENTITY, encrypt=key_of(before)).close()
            else:
                renew(disk.root)
        disk.after_cut(root := folder / str(seed), rng)
        shutil.rmtree(disk.root)
        with Store.open(root, ROW_IDENTITY, encrypt=key_of(before)) as store:
            if "meanwhile" in {info.id for info in store.sessions()}:
                store.delete_session("meanwhile")
        assert telling(root) == []
        check(root)
        remove(DATABASE)(root)
        check(root)


def renew(root: Path) -> None:
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.vault is not None
        with keys_renewed(store.state, store.vault):
            store.commit_turn(turn_of([1, 2], [3], session="meanwhile"))


def encrypted_and_killed(root: Path) -> None:
    encrypt(root)
    committed_and_killed(root)


def test_a_renewal_is_killed_anywhere(folder: Path) -> None:
    """The store opens with either key, and the next renewal ends with one."""
    shared = folder / "before.key"  # the copies name it
    for root in killed_anywhere(folder, encrypted_and_killed, renew):
        assert shared.exists()
        with Store.open(root, ROW_IDENTITY) as store:
            if "meanwhile" in {info.id for info in store.sessions()}:
                store.delete_session("meanwhile")
        check(root)
        renew(root)
        with Store.open(root, ROW_IDENTITY) as store:
            store.delete_session("meanwhile")
        vault = vault_of(root)
        assert vault is not None
        assert len(vault.key_ids) == 1
        check(root)
        remove(DATABASE)(root)
        check(root)


@pytest.mark.parametrize("part", [0.1, 0.4, 0.7, 1.0])
def test_killed_while_pages_are_encrypted_again(root: Path, part: float) -> None:
    """Within SQLCipher's one statement: all pages have the new key then, or none."""
    encrypt(root)
    work = """
        import sys, time
        from pathlib import Path
        from store_tools import ROW_IDENTITY
        from towerd.store import Store
        store = Store.open(Path(sys.argv[1]), ROW_IDENTITY)
        with store.vault.renewing():
            print("begun", flush=True)
            store.state.catalog.renew_key()
            print("done", flush=True)
            time.sleep(60)
    """
    with Store.open(root, ROW_IDENTITY) as store:
        populate(store)
        for number in range(8):
            store.set_meta(f"large-{number}", os.urandom(1 << 20).hex())
        assert store.vault is not None
        with suppress(InterruptedError), store.vault.renewing():
            start = time.monotonic()
            store.state.catalog.renew_key()
            took_s = time.monotonic() - start
            raise InterruptedError  # as if it was killed here
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, "-P", "-c", textwrap.dedent(work), str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        time.sleep(part * took_s)
        process.send_signal(signal.SIGKILL)
    check(root)
    renew(root)
    with Store.open(root, ROW_IDENTITY) as store:
        store.delete_session("meanwhile")
        assert len(store.get_meta("large-7") or "") == 2 << 20
    check(root)


def test_a_renewal_of_a_damaged_catalog(root: Path) -> None:
    """It is rebuilt from its journal, with the new key."""
    encrypt(root)
    with Store.open(root, ROW_IDENTITY) as store:
        populate(store)
        store.flush()
        store.state.catalog.shrink()
        page = page_of("turns", root)
    with Store.open(root, ROW_IDENTITY) as store:
        store.session_ids("session-1")
        flip(root / DATABASE, page + 1000)
        assert store.vault is not None
        with keys_renewed(store.state, store.vault):
            pass
    check(root)


def test_a_renewal_without_room(root: Path) -> None:
    """It fails as a full disk does, the store works on, and the next one succeeds."""
    encrypt(root)
    done = run_python(
        """
        import resource, sys
        from pathlib import Path
        from store_tools import ROW_IDENTITY, turn_of
        from ten_sessions import check_open, populate
        from towerd.errors import DiskFull
        from towerd.store import Store
        from towerd.store.maintenance.renewal import keys_renewed
        store = Store.open(Path(sys.argv[1]), ROW_IDENTITY)
        populate(store)
        store.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, -1))
        try:
            with keys_renewed(store.state, store.vault):
                pass
        except DiskFull as error:
            print(error.message)
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        check_open(store)
        with keys_renewed(store.state, store.vault):
            pass
        check_open(store)
        """,
        str(root),
    )
    assert "free disk space" in done
    check(root)


def test_a_renewal_of_a_store_of_several_processes(root: Path) -> None:
    """The broker encrypts its catalog again; its clients notice nothing."""
    encrypt(root)
    broker = CatalogBroker(root)
    with ExitStack() as closing_all:
        closing_all.callback(broker.close)
        two, one = (
            closing_all.enter_context(
                Store.open(root, model, catalog_fd=broker.connect().socket.detach())
            )
            for model in (OTHER_MODEL, ROW_IDENTITY)
        )
        populate(one)
        assert one.vault is not None
        with keys_renewed(one.state, one.vault):
            pass
        two.commit_turn(turn_of([1, 2], [3], session="two"))
        assert len(one.sessions()) == 11
        one.delete_session("two")
        assert broker.vault is not None
        assert broker.vault.key_ids == one.vault.key_ids == [2]
    check(root)


def damage_leaf(root: Path, table: str, key: int) -> set[int]:
    """Flip a bit of the page that a row is on; the keys of that page."""
    for page in range(1, (root / DATABASE).stat().st_size // 4096):
        flip(root / DATABASE, 4096 * page + 1000)
        if not is_readable(root, table, key):
            lost = {row for row in range(1, 301) if not is_readable(root, table, row)}
            if len(lost) < 300:
                return lost
        flip(root / DATABASE, 4096 * page + 1000)
    return set()


def is_readable(root: Path, table: str, key: int) -> bool:
    with closing(connect(root)) as db:
        try:
            return bool(db.execute(f"SELECT * FROM {table} WHERE rowid = ?", (key,)).fetchall())
        except sqlite3.DatabaseError:
            return False


def test_other_pages_of_a_damaged_catalog_are_used(root: Path) -> None:
    """A connection to an encrypted database reads nothing after a damaged page; what lies behind it is there."""
    encrypt(root)
    with Store.open(root, ROW_IDENTITY) as store:
        for number in range(300):
            store.commit_turn(turn_of([number, 1, 2], [3], session=f"chat-{number:03d}"))
        store.gc()  # one snapshot, whose first frames are of sessions
    (snapshot,) = (root / "journal").glob("*.snapshot")
    flip(snapshot, 100)
    lost = damage_leaf(root, "sessions", 100)
    with Store.open(root, ROW_IDENTITY) as store:
        found = {info.id for info in store.sessions()}
    assert 100 in lost
    assert found == {f"chat-{pk - 1:03d}" for pk in range(1, 301) if pk not in lost}


def test_without_its_keys_a_store_says_so(root: Path) -> None:
    """One sentence each: another key, no key, no key files."""
    encrypt(root)
    closed(root)
    key = root.with_name("store.key")
    right = key.read_bytes()
    key.write_text("ab" * 32)
    with pytest.raises(ConfigError, match="does not open this store"):
        Store.open(root, ROW_IDENTITY)
    key.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        Store.open(root, ROW_IDENTITY)
    key.write_bytes(right)
    names = ("keys.json", "keys.copy")
    kept = {name: (root / name).read_bytes() for name in names}
    remove(*names)(root)
    with pytest.raises(
        StoreError, match="is encrypted, and its keys.json and keys.copy are missing"
    ):
        Store.open(root, ROW_IDENTITY)
    for name, data in kept.items():
        (root / name).write_bytes(data)
    check(root)


def test_a_plain_store_imports_nothing_of_it(root: Path) -> None:
    said = run_python(
        """
        import sys
        from pathlib import Path
        from store_tools import ROW_IDENTITY, turn_of
        from towerd.search.file import FILE_NAME
        from towerd.search.index import SearchIndex
        from towerd.store import Store
        root = Path(sys.argv[1])
        with Store.open(root, ROW_IDENTITY) as store:
            store.commit_turn(turn_of([1, 2, 3], [4], session="a"))
            store.gc()
            store.verify(repair=True)
            SearchIndex(root / FILE_NAME, store.writes, store.vault).close()
        print(sorted({"cryptography", "keyring", "sqlcipher3"} & sys.modules.keys()))
        """,
        str(root),
    )
    assert said == "[]\n"


def test_a_full_disk_while_encrypting(root: Path) -> None:
    """The store stays as it was, and the next start with room encrypts it."""
    closed(root)
    said = run_python(
        """
        import resource, sys
        from pathlib import Path
        from encrypted_stores import key_of
        from store_tools import ROW_IDENTITY
        from towerd.errors import StoreError
        from towerd.store import Store
        root = Path(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, -1))
        try:
            Store.open(root, ROW_IDENTITY, encrypt=key_of(root))
        except StoreError as error:
            print(error.message)
        """,
        str(root),
    )
    assert str(root) in said
    open_encrypted(root).close()
    check(root)
    assert telling(root) == []
