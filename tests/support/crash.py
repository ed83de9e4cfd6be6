"""Processes that are killed, at the end or at any call to the system."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

CHANGING = frozenset(
    ("write", "open", "rename", "replace", "link", "unlink", "ftruncate", "fsync", "mkdir")
)
"""Calls of the system between which a kill can leave different files."""
CONNECTIONS = frozenset(("Connection", "CipherConnection", "CipherCursor"))
STORE, CIPHER = "/towerd/store/", "/towerd/store/encryption/sqlcipher.py"


def killed_after(work: Callable[[], object]) -> None:
    """Run it in another process, which is then killed with everything that it has open."""

    def work_and_die() -> None:
        work()
        _die()

    assert _forked(work_and_die) == -signal.SIGKILL


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Do it in another process, which is killed before the `number`-th time that the store changes
    files or begins to use SQLite in another function; whether it got that far."""

    def work_until() -> None:
        _die_at(number)
        work()

    status = _forked(work_until)
    assert status in (0, -signal.SIGKILL), status
    return status != 0


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(number: int) -> None:
    left, last = number, ""

    def count(frame: FrameType, event: str, what: Any) -> None:
        nonlocal left, last
        if event != "c_call" or not _is_ours(frame):
            return
        is_database = type(what.__self__).__name__ in CONNECTIONS
        where = _user(frame).f_code.co_name if is_database else ""
        if what.__name__ in CHANGING or (is_database and where != last):
            last = where
            left -= 1
            if left == 0:
                _die()

    sys.setprofile(count)


def _user(frame: FrameType) -> FrameType:
    """What uses an encrypted database through its connection."""
    while frame.f_code.co_filename.endswith(CIPHER) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_ours(frame: FrameType) -> bool:
    """Called by the store, or by a helper of the library for it."""
    above = frame.f_back
    return STORE in frame.f_code.co_filename or (
        above is not None and STORE in above.f_code.co_filename
    )


def _forked(work: Callable[[], object]) -> int:
    """The exit code, negative for a signal."""
    with warnings.catch_warnings():  # newer Pythons warn of threads, which the child never uses
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
