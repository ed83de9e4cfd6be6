"""SQLite's files on a simulated disk: its own VFS, of which five functions are exchanged."""

from __future__ import annotations

import ctypes
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from simulated_disk import PowerLost, SimulatedDisk, Write

from towerd.store.encryption import sqlcipher
from towerd.store.encryption.sqlcipher import CipherConnection

_OK, _IOERR, _FULL = 0, 10, 13
_SYNCS_ITS_FOLDER = 0x00080000 | 0x00000800  # SQLITE_OPEN_WAL, SQLITE_OPEN_MAIN_JOURNAL
_P, _I = ctypes.c_void_p, ctypes.c_int
# names are addresses: SQLite keeps them, and looks for the parameters of a URI behind them
_Open = ctypes.CFUNCTYPE(_I, _P, _P, _P, _I, _P)
_Delete = ctypes.CFUNCTYPE(_I, _P, _P, _I)
_WriteAt = ctypes.CFUNCTYPE(_I, _P, _P, _I, ctypes.c_int64)
_Truncate = ctypes.CFUNCTYPE(_I, _P, ctypes.c_int64)
_Sync = ctypes.CFUNCTYPE(_I, _P, _I)
_Sleep = ctypes.CFUNCTYPE(_I, _P, _I)
_XSLEEP = 7
"""Its place among the `others`."""
_XWRITE, _XTRUNCATE, _XSYNC = 2, 3, 4
_METHODS = 18


class _Vfs(ctypes.Structure):
    """sqlite3_vfs, version 3."""

    _fields_ = (
        ("iVersion", _I),
        ("szOsFile", _I),
        ("mxPathname", _I),
        ("pNext", _P),
        ("zName", ctypes.c_char_p),
        ("pAppData", _P),
        ("xOpen", _P),
        ("xDelete", _P),
        ("others", _P * 14),
    )


class _Methods(ctypes.Structure):
    """sqlite3_io_methods, version 3."""

    _fields_ = (("iVersion", _I), ("calls", _P * _METHODS))


class SqliteFiles:
    """The VFS of an SQLite of this process, registered once; it writes to `disk` while that is set."""

    def __init__(self, module: str | None) -> None:
        """module: the file that has it, or is linked with it; None: this program."""
        self.disk: SimulatedDisk | None = None
        self._files: dict[int, tuple[Path, int]] = {}
        self._methods: dict[int, _Methods] = {}
        library = ctypes.CDLL(module)
        library.sqlite3_vfs_find.restype = ctypes.POINTER(_Vfs)
        found = library.sqlite3_vfs_find(None)
        self._real_open = _Open(found.contents.xOpen)
        self._real_delete = _Delete(found.contents.xDelete)
        self._vfs = _Vfs()
        ctypes.memmove(ctypes.byref(self._vfs), found, ctypes.sizeof(_Vfs))
        opened, deleted = _Open(self._open), _Delete(self._delete)
        self._real_sleep = _Sleep(found.contents.others[_XSLEEP])
        slept = _Sleep(self._sleep)
        self._kept: list[object] = [opened, deleted, slept]
        self._vfs.zName = b"simulated"
        self._vfs.xOpen = ctypes.cast(opened, _P).value
        self._vfs.xDelete = ctypes.cast(deleted, _P).value
        self._vfs.others[_XSLEEP] = ctypes.cast(slept, _P).value
        assert library.sqlite3_vfs_register(ctypes.byref(self._vfs), 1) == _OK

    def _guarded(self, call: Callable[[SimulatedDisk], int]) -> int:
        """SQLite hears of an error by its number."""
        if self.disk is None:  # what a power cut left is freed when its disk is gone
            return _IOERR
        try:
            self.disk.begin()
            return call(self.disk)
        except PowerLost:
            return _IOERR
        except OSError:
            return _FULL

    def _sleep(self, vfs: int, n_us: int) -> int:
        """Wait for another connection's lock."""
        if self.disk is None:
            return int(self._real_sleep(vfs, n_us))
        with suppress(PowerLost):
            time.sleep(n_us / 1e6)
        return n_us

    def _open(self, vfs: int, name: int | None, file: int, flags: int, out: int | None) -> int:
        path = Path(os.fsdecode(ctypes.string_at(name))) if name else None
        if self.disk is None or path is None or not self.disk.has(path):
            return int(self._real_open(vfs, name, file, flags, out))

        def opened(disk: SimulatedDisk) -> int:
            is_new = not path.exists()
            if is_new:
                disk.change("create", path, needs_room=True)
            code = int(self._real_open(vfs, name, file, flags, out))
            if is_new and path.exists():
                disk.made(path)
            if code == _OK:
                self._files[file] = (path, flags)
                self._exchange(file)
            return code

        return self._guarded(opened)

    def _exchange(self, file: int) -> None:
        """Give an open file the methods below."""
        slot = ctypes.cast(file, ctypes.POINTER(_P))
        real = slot[0]
        assert real is not None
        if real not in self._methods:
            own = _Methods()
            ctypes.memmove(ctypes.byref(own), real, ctypes.sizeof(_Methods))
            calls = (
                (_XWRITE, self._writer(_WriteAt(own.calls[_XWRITE]))),
                (_XTRUNCATE, self._truncater(_Truncate(own.calls[_XTRUNCATE]))),
                (_XSYNC, self._syncer(_Sync(own.calls[_XSYNC]))),
            )
            self._kept += [call for _, call in calls]
            for at, call in calls:
                own.calls[at] = ctypes.cast(call, _P).value
            self._methods[real] = own
        slot[0] = ctypes.addressof(self._methods[real])

    def _writer(self, real: Callable[..., int]) -> Any:
        def write(file: int, data: int, n: int, at: int) -> int:
            path, _ = self._files[file]

            def written(disk: SimulatedDisk) -> int:
                disk.change("write", path, needs_room=True)
                code = real(file, data, n, at)
                if (known := disk.file(path)) is not None:
                    known.unsynced.append(Write(at, ctypes.string_at(data, n)))
                return code

            return self._guarded(written)

        return _WriteAt(write)

    def _truncater(self, real: Callable[..., int]) -> Any:
        def truncate(file: int, size: int) -> int:
            path, _ = self._files[file]

            def truncated(disk: SimulatedDisk) -> int:
                disk.change("truncate", path)
                if (known := disk.file(path)) is not None:
                    known.unsynced.append(Write(size, None))
                return real(file, size)

            return self._guarded(truncated)

        return _Truncate(truncate)

    def _syncer(self, real: Callable[..., int]) -> Any:
        def sync(file: int, flags: int) -> int:
            path, opened = self._files[file]

            def synced(disk: SimulatedDisk) -> int:
                disk.change("sync", path)
                if (known := disk.file(path)) is not None:
                    known.sync()
                if opened & _SYNCS_ITS_FOLDER:  # as SQLite does at the first sync
                    self._files[file] = (path, opened & ~_SYNCS_ITS_FOLDER)
                    disk.sync_folder(path.parent)
                return _OK

            return self._guarded(synced)

        return _Sync(sync)

    def _delete(self, vfs: int, name: int, syncs: int) -> int:
        path = Path(os.fsdecode(ctypes.string_at(name)))
        if self.disk is None or not self.disk.has(path) or not path.exists():
            return int(self._real_delete(vfs, name, syncs))

        def deleted(disk: SimulatedDisk) -> int:
            disk.change("remove", path)
            code = int(self._real_delete(vfs, name, 0))
            disk.removed(path)
            if syncs:
                disk.sync_folder(path.parent)
            return code

        return self._guarded(deleted)


class OneThread:
    """That no two threads use a connection at once: SQLite would have the second one wait, whoever is to run."""

    def __init__(self) -> None:
        self._user: int | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Use it inside the block. Raises AssertionError."""
        before, me = self._user, threading.get_ident()
        assert before in (None, me), "two threads use one connection"
        self._user = me
        try:
            yield
        finally:
            self._user = before


class OneThreadsConnection(sqlite3.Connection):
    """One of SQLite."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._used = OneThread()

    def execute(self, *what: Any) -> sqlite3.Cursor:
        """See `sqlite3.Connection.execute`. Raises AssertionError."""
        with self._used():
            return super().execute(*what)

    def executemany(self, *what: Any) -> sqlite3.Cursor:
        """See `sqlite3.Connection.executemany`. Raises AssertionError."""
        with self._used():
            return super().executemany(*what)


class OneThreadsCipher(CipherConnection):
    """One of SQLCipher. A thread is suspended in calls of the VFS alone, where SQLCipher has locked this connection and none
    of its own mutexes: those, of its providers and random numbers, it holds while it computes."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._used = OneThread()

    def execute(self, sql: str, parameters: Any = ()) -> Any:
        """See `CipherConnection.execute`. Raises AssertionError."""
        return self._run("execute", sql, parameters)

    def executemany(self, sql: str, parameters: Any) -> Any:
        """See `CipherConnection.executemany`. Raises AssertionError."""
        return self._run("executemany", sql, parameters)

    def _run(self, how: str, sql: str, parameters: Any) -> Any:
        with self._used():
            cursor = self.cursor()
            try:
                return getattr(cursor, how)(sql, parameters)
            except BaseException:
                # else it is freed with the error, which locks the connection, whoever has that
                cursor.close()
                raise


@contextmanager
def connections_guarded() -> Iterator[None]:
    """What connects to a database has such a connection, inside the block."""
    with (
        patch("sqlite3.connect", partial(sqlite3.connect, factory=OneThreadsConnection)),
        patch.object(sqlcipher, "CipherConnection", OneThreadsCipher),
    ):
        yield


_registered: dict[str | None, SqliteFiles] = {}


@contextmanager
def sqlite_on(disk: SimulatedDisk) -> Iterator[None]:
    """SQLite's files, and SQLCipher's if it was imported, below the disk's root are on the disk, inside the block."""
    modules = [
        each for name in ("_sqlite3", "sqlcipher3._sqlite3") if (each := sys.modules.get(name))
    ]
    for name in (getattr(each, "__file__", None) for each in modules):
        if name not in _registered:
            _registered[name] = SqliteFiles(name)
    for files in _registered.values():
        files.disk = disk
    try:
        yield
    finally:
        for files in _registered.values():
            files.disk = None
