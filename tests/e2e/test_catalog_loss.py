"""A daemon whose catalog was damaged or lost: every conversation is there, and the log says so."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import requests
from daemon import Daemon, run_towerctl

MakeDaemon = Callable[..., Daemon]
N_SESSIONS = 10


def talk(daemon: Daemon) -> dict[str, list[int]]:
    """Ten sessions of two turns: the tokens of each."""
    said = {}
    for number in range(N_SESSIONS):
        name, ids = f"chat-{number}", [1, 300 + number, *range(310, 330)]
        for _ in range(2):
            body = {"prompt": ids, "n_predict": 8, "return_tokens": True, "ignore_eos": True}
            reply = daemon.post("/completion", body, headers={"X-Towerd-Session": name})
            ids = ids + reply["tokens"]
        said[name] = ids
    return said


def check(daemon: Daemon, said: dict[str, list[int]]) -> None:
    assert {name: daemon.session_ids(name) for name in said} == said


def damage(daemon: Daemon, statement: str) -> None:
    """A change of the catalog that towerd did not make."""
    db = sqlite3.connect(daemon.store_dir / "catalog.sqlite", isolation_level=None)
    db.execute(statement)
    db.close()


@contextmanager
def unflushed(daemon: Daemon) -> Iterator[None]:
    """Keep what the catalog is told in its WAL: a reader that began before needs the database as
    it is, so that the flush of an idle daemon changes nothing."""
    catalog = daemon.store_dir / "catalog.sqlite"
    reader = sqlite3.connect(f"file:{catalog}?mode=ro", uri=True, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM sessions").fetchall()
    yield
    reader.close()


def test_a_bit_of_the_first_frame_after_a_kill(make_daemon: MakeDaemon) -> None:
    """SQLite drops the whole WAL; the journal has the turns that were in it."""
    daemon = make_daemon()
    with daemon, unflushed(daemon):
        said = talk(daemon)
        daemon.kill()
    wal = daemon.store_dir / "catalog.sqlite-wal"
    data = bytearray(wal.read_bytes())
    data[32 + 24 + 50] ^= 1
    wal.write_bytes(data)
    with daemon:
        check(daemon, said)
        assert "from its journal" in daemon.log
        assert daemon.stop() == 0
    with daemon.stored():
        pass


def test_a_deleted_catalog(make_daemon: MakeDaemon) -> None:
    """towerctl verify rebuilds it and says so; so does a start; doctor says what will be done."""
    daemon = make_daemon()
    with daemon:
        said = talk(daemon)
        assert daemon.stop() == 0
    catalog = daemon.store_dir / "catalog.sqlite"
    told = "rebuilt from its journal (it was missing): 10 sessions with 20 turns"
    catalog.unlink()
    assert "rebuilds it from its journal" in run_towerctl(daemon, "doctor").stdout
    assert told in run_towerctl(daemon, "verify").stdout
    catalog.unlink()
    with daemon:
        assert told in daemon.log
        check(daemon, said)


def test_verify_repairs_a_running_daemon(make_daemon: MakeDaemon) -> None:
    """It names the damage; with --repair the daemon is right again without a restart."""
    with make_daemon() as daemon:
        said = talk(daemon)
        damage(daemon, "UPDATE sessions SET title = 'other' WHERE id = 'chat-3'")
        found = run_towerctl(daemon, "verify")
        assert found.returncode == 1
        assert "wrong checksums in sessions" in found.stdout
        assert "rebuilt from its journal" in run_towerctl(daemon, "verify", "--repair").stdout
        assert run_towerctl(daemon, "verify").returncode == 0
        assert daemon.get("/towerd/v1/sessions/chat-3")["session"]["title"] != "other"
        check(daemon, said)


def test_clients_do_not_learn_where_the_store_is(make_daemon: MakeDaemon) -> None:
    """The body of an error says that the store failed; the log, and towerctl to the owner, say what
    and where."""
    with make_daemon() as daemon:
        talk(daemon)
        damage(daemon, "UPDATE turns SET tail = zeroblob(4)")
        assert (daemon.store_dir / "catalog.sqlite-wal").exists(), (
            "its locks on the catalog are lost"
        )
        for log in (daemon.store_dir / "journal").iterdir():
            log.write_bytes(b"garbage")
        reply = requests.get(daemon.url + "/towerd/v1/sessions/chat-3?ids=1", timeout=30)
        assert reply.status_code == 500
        assert reply.json()["error"]["type"] == "server_error"
        assert str(daemon.store_dir) not in reply.text
        assert str(daemon.store_dir / "catalog.sqlite") in daemon.log
        told = run_towerctl(daemon, "export", "chat-3").stderr
        assert str(daemon.store_dir / "catalog.sqlite") in told
