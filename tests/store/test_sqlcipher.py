"""SQLCipher's connections behave as those of `sqlite3`, which is asked the same."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from encrypted_stores import encrypt

from towerd.store.encryption.sqlcipher import connect
from towerd.store.encryption.vault import Vault

Use = Callable[[sqlite3.Connection, sqlite3.Connection], object]
"""Of two connections to one file."""


def of_script(script: str) -> Use:
    return lambda db, _: db.executescript(script)


def of_query(sql: str, *params: object) -> Use:
    return lambda db, _: db.execute(sql, params).fetchall()


def locked(db: sqlite3.Connection, other: sqlite3.Connection) -> None:
    other.execute("BEGIN IMMEDIATE")
    db.execute("BEGIN IMMEDIATE")


def full(db: sqlite3.Connection, _: sqlite3.Connection) -> None:
    db.execute("PRAGMA max_page_count = 4")
    db.execute("INSERT INTO t VALUES (3, zeroblob(100000))")


def failing_function(db: sqlite3.Connection, _: sqlite3.Connection) -> None:
    db.create_function("fails", 0, lambda: 1 // 0)
    db.execute("SELECT fails()").fetchone()


def removed_function(db: sqlite3.Connection, _: sqlite3.Connection) -> None:
    db.create_function("gone", -1, lambda *args: len(args), deterministic=True)
    assert db.execute("SELECT gone(1, 2)").fetchone() == (2,)
    db.create_function("gone", -1, None)
    db.execute("SELECT gone(1)").fetchall()


def closed(db: sqlite3.Connection, _: sqlite3.Connection) -> None:
    db.close()
    db.execute("SELECT 1")


def in_iteration(db: sqlite3.Connection, _: sqlite3.Connection) -> list[object]:
    return list(db.execute("SELECT abs(-9223372036854775807 - (id = 2)) FROM t"))


ERRORS: dict[str, Use] = {
    "syntax": of_query("SELEC 1"),
    "no table": of_query("SELECT * FROM nothing"),
    "syntax in a script": of_script("CREATE TABLE u (a); SELEC"),
    "unique": of_query("INSERT INTO t VALUES (1, 'b')"),
    "unique of many": lambda db, _: db.executemany("INSERT INTO t VALUES (?, 'b')", [(7,), (1,)]),
    "not null": of_query("INSERT INTO t VALUES (8, NULL)"),
    "check": of_query("INSERT INTO t VALUES (-1, 'x')"),
    "strict type": of_query("INSERT INTO s VALUES ('text')"),
    "key that is no number": of_query("INSERT INTO t VALUES ('text', 'x')"),
    "too few parameters": of_query("SELECT ?, ?", 1),
    "nested transactions": of_script("BEGIN; BEGIN"),
    "commit without one": of_query("COMMIT"),
    "not UTF-8": of_query("SELECT CAST(x'ff' AS TEXT)"),
    "overflow": in_iteration,
    "full text syntax": of_query("SELECT * FROM words WHERE words MATCH '\"'"),
    "locked": locked,
    "full": full,
    "failing function": failing_function,
    "removed function": removed_function,
    "closed": closed,
    "read-only": of_script("PRAGMA query_only = ON; DELETE FROM t"),
    "no folder": of_query("ATTACH DATABASE '/nowhere/at/all' AS a"),
}


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    encrypt(tmp_path / "store")
    return Vault.open(tmp_path / "store")


def error_of(use: Use, open_one: Callable[[], sqlite3.Connection]) -> tuple[object, ...]:
    """What an error says, and whether a transaction is open after it."""
    with closing(open_one()) as db, closing(open_one()) as other:
        db.execute("PRAGMA busy_timeout = 1")
        db.executescript(
            "PRAGMA journal_mode = WAL; CREATE TABLE t (id INTEGER PRIMARY KEY CHECK (id >= 0), a TEXT NOT NULL);"
            "CREATE TABLE s (a INTEGER) STRICT; CREATE VIRTUAL TABLE words USING fts5(text);"
            "INSERT INTO t VALUES (1, 'a'), (2, 'b'); PRAGMA wal_checkpoint(TRUNCATE)"
        )
        with pytest.raises(sqlite3.Error) as caught:
            use(db, other)
        code = getattr(caught.value, "sqlite_errorcode", 0) & 0xFF
        is_open = str(caught.value) != "Cannot operate on a closed database." and db.in_transaction
        return type(caught.value), code, is_open


@pytest.mark.parametrize("what", ERRORS)
def test_errors_are_the_same(what: str, tmp_path: Path, vault: Vault) -> None:
    plain = error_of(
        ERRORS[what],
        lambda: sqlite3.connect(tmp_path / "a", isolation_level=None, check_same_thread=False),
    )
    assert error_of(ERRORS[what], lambda: connect(tmp_path / "b", vault, "test")) == plain


def damaged(path: Path) -> Iterator[str]:
    """A database of several pages, damaged in different ways."""
    whole = path.read_bytes()
    for what, data in {
        "garbage": b"garbage " * 1000,
        "first page": whole[:50] + b"\0" * 20 + whole[70:],
        "half": whole[: len(whole) // 2],
    }.items():
        path.write_bytes(data)
        yield what


def test_damage_is_told_as_sqlite_tells_it(tmp_path: Path, vault: Vault) -> None:
    path = tmp_path / "a"
    with closing(connect(path, vault, "test")) as db:
        db.execute("CREATE TABLE t (a)")
        db.executemany("INSERT INTO t VALUES (?)", [(bytes(1000),)] * 100)
    codes = {}
    for what in damaged(path):
        with closing(connect(path, vault, "test")) as db:
            with pytest.raises(sqlite3.DatabaseError) as caught:
                db.execute("SELECT sum(length(a)) FROM t").fetchall()
            codes[what] = caught.value.sqlite_errorcode
    assert codes == {
        "garbage": sqlite3.SQLITE_NOTADB,
        "first page": sqlite3.SQLITE_NOTADB,
        "half": sqlite3.SQLITE_CORRUPT,
    }


def test_the_other_key_is_tried(tmp_path: Path, vault: Vault) -> None:
    """A file of before a renewal is read, and a new one has the new key."""
    with closing(connect(tmp_path / "a", vault, "test")) as db:
        db.execute("CREATE TABLE t (a)")
    with vault.renewing():
        for name in ("a", "b"):
            with closing(connect(tmp_path / name, vault, "test")) as db:
                db.execute("CREATE TABLE IF NOT EXISTS t (a)")
                db.execute("INSERT INTO t VALUES (1)")
    with closing(connect(tmp_path / "b", vault, "test")) as db:
        assert db.execute("SELECT * FROM t").fetchall() == [(1,)]
    with closing(connect(tmp_path / "a", vault, "test")) as db:
        with pytest.raises(sqlite3.DatabaseError, match="not a database"):
            db.execute("SELECT * FROM t")


def test_nothing_is_written_to_stderr(
    tmp_path: Path, vault: Vault, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_bytes(b"garbage " * 1000)
    with closing(connect(tmp_path / "a", vault, "test")) as db:
        with pytest.raises(sqlite3.DatabaseError):
            db.execute("SELECT * FROM t")
    assert capfd.readouterr() == ("", "")
