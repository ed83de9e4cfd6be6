"""This process as the operating system has it: its name, its parent, its allocator; and whether another
one is stopped."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
NAME_BYTES_MAX = 15
"""The kernel keeps no more."""
STOPPED = b"T"
LARGE_BYTES = 1 << 20
"""Allocations of this size or more are mapped one by one, and unmapped when they are freed."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_ARENAS = 2


def name_process(name: str) -> None:
    """Call this process so in `ps -o comm`, `top` and `pgrep`, on Linux. Call it in the main thread: each
    thread has a name of its own."""
    if sys.platform == "linux":
        said = name.encode()[:NAME_BYTES_MAX]
        ctypes.CDLL(None).prctl(PR_SET_NAME, ctypes.c_char_p(said), 0, 0, 0)


def die_with_parent(pipe: int) -> None:
    """Kill this process when its parent is gone: when `pipe`, whose other end only the parent holds,
    is closed; on Linux also by the kernel, which needs no thread of this process to run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(pipe,), name="towerd-parent", daemon=True).start()


def _watch(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def return_large_blocks() -> None:
    """Have glibc give every large block back when it is freed, so that freed rows go back to the system;
    nothing happens with another C library. By itself glibc raises its threshold up to 32 MiB as soon as
    such a block was freed, and then keeps freed rows between others that are in use."""
    if sys.platform != "linux":
        return
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, LARGE_BYTES)


def share_arenas() -> None:
    """Have glibc's threads share two heaps, of which each keeps free memory and reserves 64 MiB of addresses; nothing
    happens with another C library. To be called before there are threads."""
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


def return_free_memory() -> None:
    """Have glibc give back what it keeps of freed memory; nothing happens with another C library."""
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal: by SIGSTOP or ^Z it runs no more, and answers nobody.
    One that has ended is not; a debugger that holds it does not count."""
    if sys.platform == "linux":
        try:
            line = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return False
        return line.rpartition(b")")[2].split()[:1] == [STOPPED]
    import psutil

    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False
