"""The name of this process in `ps -o comm`, `top` and `pgrep`, on Linux."""

from __future__ import annotations

import ctypes
import sys

PR_SET_NAME = 15
NAME_BYTES_MAX = 15
"""The kernel keeps no more."""


def name_process(name: str) -> None:
    """Call this process so, on Linux. Call it in the main thread: each thread has a name of its own."""
    if sys.platform == "linux":
        said = name.encode()[:NAME_BYTES_MAX]
        ctypes.CDLL(None).prctl(PR_SET_NAME, ctypes.c_char_p(said), 0, 0, 0)
