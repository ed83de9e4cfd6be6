"""Ends this process when the one that started it ends, for whatever reason."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


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
