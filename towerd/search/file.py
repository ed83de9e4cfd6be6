"""The file of the search index: making it, opening it, and beginning it anew.

Several processes may have it open. One that begins it anew puts another file in its place, under a
lock that all take to open it; the others notice that theirs is not that file any more.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from towerd.store.encryption.vault import Vault

FILE_NAME = "search.sqlite"
LOCK_NAME = "search.lock"
APPLICATION_ID = 0x54575253
VERSION = 4
_PURPOSE = "search"
"""Of the key that an index is encrypted with."""
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT})
_SETTINGS = (
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "busy_timeout = 5000",
    "secure_delete = ON",
    "temp_store = MEMORY",
    "trusted_schema = OFF",
)
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE sessions (
    pk INTEGER PRIMARY KEY,
    tokenizer TEXT NOT NULL,
    scope TEXT NOT NULL,
    id TEXT NOT NULL,
    created REAL NOT NULL,
    question TEXT NOT NULL,
    whole INTEGER,
    UNIQUE (tokenizer, scope, id)
) STRICT;
CREATE INDEX sessions_id ON sessions(id);
CREATE TABLE passages (
    rowid INTEGER PRIMARY KEY,
    session INTEGER NOT NULL REFERENCES sessions,
    turn INTEGER NOT NULL,
    said REAL NOT NULL,
    text TEXT NOT NULL,
    seal INTEGER NOT NULL,
    UNIQUE (session, turn)
) STRICT;
CREATE VIRTUAL TABLE words USING fts5(
    text, content = 'passages', tokenize = 'unicode61 remove_diacritics 2'
);
CREATE TABLE scrubs (removals INTEGER NOT NULL, scrubbed INTEGER NOT NULL) STRICT;
INSERT INTO scrubs VALUES (0, 0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
COMMIT;
"""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A connection, and which file it is of."""

    db: sqlite3.Connection
    inode: int
    vault: Vault | None
    """The keys of an encrypted store."""

    def is_of_earlier_key(self) -> bool:
        """Whether the store's key was renewed since the file was opened."""
        if self.vault is None:
            return False
        from towerd.store.encryption.sqlcipher import key_id

        return key_id(self.db) != self.vault.key_ids[0]

    def renew_key(self) -> None:
        """Encrypt the file with the store's key in use; all connections to it are then of no use. Raises sqlite3.Error."""
        if self.vault is not None:
            from towerd.store.encryption.sqlcipher import renew

            renew(self.db, self.vault, _PURPOSE)

    def is_replaced(self, path: Path) -> bool:
        """Whether another file is at `path` now."""
        try:
            return path.stat().st_ino != self.inode
        except FileNotFoundError:
            return False


def open_file(path: Path, vault: Vault | None = None) -> OpenFile:
    """Open the file, or make it; a damaged one, or one of another version or key, is made anew. vault: the keys of an
    encrypted store. Raises OSError and sqlite3.Error."""
    with _alone(path):
        try:
            return _open(path, vault)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if not is_damage(error):
                raise
            _remove(path)
            return _open(path, vault)


def begin_anew(path: Path, damaged: OpenFile) -> None:
    """Remove a damaged file, unless another process has put a new one in its place."""
    with _alone(path):
        if not damaged.is_replaced(path):
            _remove(path)


def remove_index(store_dir: Path) -> None:
    """Delete the index of a store, if it has one."""
    path = store_dir / FILE_NAME
    if path.exists():
        with _alone(path):
            _remove(path)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process opens or removes the file meanwhile."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path.with_name(LOCK_NAME), flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    for suffix in ("-wal", "-shm", ""):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _open(path: Path, vault: Vault | None) -> OpenFile:
    if not path.exists():  # closing a file that is open elsewhere in this process loses its locks
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    inode = path.stat().st_ino
    db = _connect(path, vault)
    try:
        for setting in _SETTINGS:
            db.execute(f"PRAGMA {setting}")
        ids = [
            db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("application_id", "user_version")
        ]
        if ids != [APPLICATION_ID, VERSION]:
            if ids != [0, 0]:
                raise _of_another_version()
            db.executescript(_SCHEMA)
    except BaseException:
        db.close()
        raise
    return OpenFile(db, inode, vault)


def _connect(path: Path, vault: Vault | None) -> sqlite3.Connection:
    if vault is None:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    from towerd.store.encryption.sqlcipher import connect

    return connect(path, vault, _PURPOSE)


def _of_another_version() -> sqlite3.Error:
    error = sqlite3.DatabaseError("it is of another version")
    error.sqlite_errorcode = sqlite3.SQLITE_FORMAT
    return error


def error_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code of an error; 0 if it has none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def damaged(what: str) -> sqlite3.Error:
    """An error that says that the file is damaged."""
    error = sqlite3.DatabaseError(what)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def is_damage(error: sqlite3.Error | UnicodeDecodeError) -> bool:
    """Whether an error says that the file is damaged, or not this kind of file. Statements fail as
    such if the schema is not what it was, and bytes that are no text get into texts and errors."""
    if isinstance(error, UnicodeDecodeError):
        return True
    is_of_query = str(error).startswith("fts5: syntax error")
    is_of_schema = error_code(error) == sqlite3.SQLITE_ERROR and not is_of_query
    return is_of_schema or error_code(error) in _DAMAGE or "UTF-8" in str(error)
