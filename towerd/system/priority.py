"""Thread scheduling: the event loop's thread gets a core first, background threads last.

A thread that wakes waits until the running one has used up its time slice: up to milliseconds, for
every token, in each process on the way. Since Linux 6.12 a thread may ask for a shorter slice than
others have, and then runs before them; its share of the cores stays the same.
(kernel/sched/syscalls.c, `__setparam_fair`; sched_setattr(2))
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading

SLICE_NS = 100_000
"""The shortest slice that the kernel allows. A step of the event loop takes less."""
NICE = 10
"""Niceness of a background thread."""
_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
"""The system call's number; the C library has no name for it yet."""
_RESET_ON_FORK = 1
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""`struct sched_attr` in its first version: size, policy, flags, nice value, priority, runtime,
deadline, period."""


def lower_priority() -> None:
    """Lower the priority of the calling thread, on Linux, where each thread has its own. One that is lower
    stays: only root may raise it."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        nice = max(NICE, os.getpriority(os.PRIO_PROCESS, thread))
        os.setpriority(os.PRIO_PROCESS, thread, nice)


def shorten_slice() -> bool:
    """Request the shortest slice for the calling thread. Threads and processes that it starts get
    the usual one, as they do the work that it must not wait for. Returns whether the kernel
    accepted the request; older kernels accept and ignore it.

    Does nothing if the daemon was given a scheduling class or a raised priority: its children would
    lose them."""
    number = _SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice < 0:
        return False
    wanted = (_ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, _ATTRIBUTES.pack(*wanted), 0) == 0)
