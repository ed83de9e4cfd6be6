"""Whether another process is stopped: by SIGSTOP or ^Z it runs no more, and answers nobody."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

STOPPED = b"T"


def is_stopped(pid: int) -> bool:
    """Whether this process is stopped by a signal; one that has ended is not. A debugger that holds it
    does not count."""
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
