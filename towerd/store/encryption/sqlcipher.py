"""Databases of an encrypted store: SQLCipher, behind the interface and the errors of `sqlite3`.

Each page is encrypted (AES-256-CBC, HMAC-SHA-512), in the database and in its WAL. The key and the salt, with which
others begin their file, are the vault's: a damaged salt costs nothing, and a key is derived once, not at each opening.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, cast

from sqlcipher3 import dbapi2

from towerd.errors import ConfigError
from towerd.store.encryption.vault import Vault

_SALT_BYTES = 16
_MALFORMED = "database disk image is malformed"
_READ_ONLY = "attempt to write a readonly database"
_IO_ERROR = "disk I/O error"
_REKEY_FAILED = "An error occurred with PRAGMA key or rekey"
_CODES = {
    "access permission denied": sqlite3.SQLITE_PERM,
    "authorization denied": sqlite3.SQLITE_AUTH,
    "not authorized": sqlite3.SQLITE_AUTH,
    "database is locked": sqlite3.SQLITE_BUSY,
    "database table is locked": sqlite3.SQLITE_LOCKED,
    "out of memory": sqlite3.SQLITE_NOMEM,
    _READ_ONLY: sqlite3.SQLITE_READONLY,
    "interrupted": sqlite3.SQLITE_INTERRUPT,
    _MALFORMED: sqlite3.SQLITE_CORRUPT,
    "malformed database schema": sqlite3.SQLITE_CORRUPT,
    "fts5: corrupt": sqlite3.SQLITE_CORRUPT,
    "database or disk is full": sqlite3.SQLITE_FULL,
    "unable to open database": sqlite3.SQLITE_CANTOPEN,
    "locking protocol": sqlite3.SQLITE_PROTOCOL,
    "string or blob too big": sqlite3.SQLITE_TOOBIG,
    "datatype mismatch": sqlite3.SQLITE_MISMATCH,
    "file is not a database": sqlite3.SQLITE_NOTADB,
}
"""SQLite's texts, which sqlcipher3 gives without their codes, by how they begin."""
_TEXT = re.compile("|".join(map(re.escape, _CODES)))


def connect(path: Path, vault: Vault, purpose: str, *, query: str = "") -> sqlite3.Connection:
    """A connection to a database, which is created if it is missing: with the vault's key in use, or with an earlier
    one if that is what the file has (a renewal was killed). query: of the URI, as "mode=ro".

    With one key nothing is read: a file that another key has, and a damaged one, fail when they are used, as
    SQLITE_NOTADB. Raises sqlite3.Error."""
    ids = vault.key_ids
    for id in ids if len(ids) > 1 else ():
        db = _connected(path, vault, purpose, id, query)
        if _fits(db):
            return db
        db.close()
    return _connected(path, vault, purpose, ids[0], query)


def renew(db: sqlite3.Connection, vault: Vault, purpose: str) -> None:
    """Encrypt a database that `connect` opened with the vault's key in use, in one durable transaction. Whatever
    becomes of it, this connection and all others to the file are then of no use. Raises sqlite3.Error."""
    id = vault.key_ids[0]
    if key_id(db) == id:
        return
    found = {name: path for _, name, path in db.execute("PRAGMA database_list").fetchall()}
    try:
        db.execute(f"PRAGMA rekey = {_key(vault, purpose, id)}").fetchall()
    except sqlite3.OperationalError as error:
        if not str(error).startswith(_REKEY_FAILED):
            raise
    # SQLCipher is silent on a commit that failed
    with closing(_connected(Path(found["main"]), vault, purpose, id, "")) as again:
        if _fits(again):
            return
    full = sqlite3.OperationalError("its pages could not be written again")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise full


def key_id(db: sqlite3.Connection) -> int:
    """The number of the vault's key that a connection of `connect` has."""
    return int(cast(Any, db).key_id)


class CipherConnection(dbapi2.Connection):  # type: ignore[misc]
    """What stands for an `sqlite3.Connection`. After a damaged page it fails at whatever it reads: connect again."""

    key_id: int
    """Of the vault's keys."""
    is_broken = False
    """Whether it has met a damaged page."""

    def cursor(self) -> Any:
        try:
            return super().cursor(CipherCursor)
        except dbapi2.Error as error:
            raise _translated(error, None) from error

    def execute(self, sql: str, parameters: Any = ()) -> Any:
        return self.cursor().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Any) -> Any:
        return self.cursor().executemany(sql, parameters)

    def executescript(self, script: str) -> Any:
        return self.cursor().executescript(script)

    def commit(self) -> None:
        try:
            super().commit()
        except dbapi2.Error as error:
            raise _translated(error, self) from error

    def rollback(self) -> None:
        try:
            super().rollback()
        except dbapi2.Error as error:
            raise _translated(error, self) from error

    def close(self) -> None:
        try:
            super().close()
        except dbapi2.Error as error:
            raise _translated(error, self) from error

    def create_function(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().create_function(*args, **kwargs)
        except dbapi2.Error as error:
            raise _translated(error, self) from error


class CipherCursor(dbapi2.Cursor):  # type: ignore[misc]
    """What stands for an `sqlite3.Cursor`."""

    def execute(self, sql: str, parameters: Any = ()) -> CipherCursor:
        try:
            super().execute(sql, parameters)
        except dbapi2.Error as error:
            raise _translated(error, self.connection) from error
        return self

    def executemany(self, sql: str, parameters: Any) -> CipherCursor:
        try:
            super().executemany(sql, parameters)
        except dbapi2.Error as error:
            raise _translated(error, self.connection) from error
        return self

    def executescript(self, script: str) -> CipherCursor:
        try:
            super().executescript(script)
        except dbapi2.Error as error:
            raise _translated(error, self.connection) from error
        return self

    def fetchone(self) -> Any:
        try:
            return super().fetchone()
        except dbapi2.Error as error:
            raise _translated(error, self.connection) from error

    def fetchmany(self, *size: int) -> Any:
        try:
            return super().fetchmany(*size)
        except dbapi2.Error as error:
            raise _translated(error, self.connection) from error

    def fetchall(self) -> Any:
        try:
            return super().fetchall()
        except dbapi2.Error as error:
            raise _translated(error, self.connection) from error

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except dbapi2.Error as error:
            raise _translated(error, self.connection) from error


def _connected(path: Path, vault: Vault, purpose: str, id: int, query: str) -> sqlite3.Connection:
    _check_library()
    place = f"{path.absolute().as_uri()}?{query}"
    options = {"uri": True, "isolation_level": None, "check_same_thread": False}
    try:
        db = dbapi2.connect(place, factory=CipherConnection, **options)
    except dbapi2.Error as error:
        raise _translated(error, None) from error
    db.key_id = id
    for pragma in (
        "cipher_log_level = NONE",  # else it writes to stderr
        f"key = {_key(vault, purpose, id)}",
        "cipher_compatibility = 4",
    ):
        db.execute(f"PRAGMA {pragma}").fetchall()
    return cast(sqlite3.Connection, db)


def _key(vault: Vault, purpose: str, id: int) -> str:
    key, salt = vault.key(purpose, id), vault.key(f"{purpose} salt", id)[:_SALT_BYTES]
    return f"\"x'{key.hex()}{salt.hex()}'\""


def _fits(db: sqlite3.Connection) -> bool:
    """Whether the file is of this connection's key, as far as it tells."""
    try:
        db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except sqlite3.Error as error:
        return getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_NOTADB
    return True


@cache
def _check_library() -> None:
    """Raises ConfigError if what was loaded does not encrypt: to SQLite itself a key is nothing."""
    db = dbapi2.connect(":memory:")
    try:
        if not db.execute("PRAGMA cipher_version").fetchall():
            raise ConfigError(
                "This Python's own SQLite conflicts with SQLCipher: use another Python to encrypt a store."
            )
    finally:
        db.close()


def _translated(error: Exception, db: CipherConnection | None) -> sqlite3.Error:
    """The error that `sqlite3` would have raised."""
    text = str(error)
    kind = cast(type[sqlite3.Error], getattr(sqlite3, type(error).__name__, sqlite3.DatabaseError))
    if db is not None and db.is_broken and text == _READ_ONLY:
        kind, text = sqlite3.DatabaseError, _MALFORMED
    found = kind(text)
    code = _code(error, text, db)
    if code:
        found.sqlite_errorcode = code
    if db is not None and code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        db.is_broken = True
    return found


def _code(error: Exception, text: str, db: CipherConnection | None) -> int:
    """SQLite's code; 0 for errors that are not its own."""
    if text == _IO_ERROR:  # which one it was is not told
        is_writing = db is not None and db.in_transaction
        return sqlite3.SQLITE_IOERR_WRITE if is_writing else sqlite3.SQLITE_IOERR_READ
    if known := _TEXT.match(text):
        return _CODES[known[0]]
    if isinstance(error, dbapi2.IntegrityError):
        return sqlite3.SQLITE_CONSTRAINT
    is_own = isinstance(error, dbapi2.InterfaceError | dbapi2.ProgrammingError) or "UTF-8" in text
    return 0 if is_own else sqlite3.SQLITE_ERROR
