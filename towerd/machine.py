"""What the machine has. psutil knows it everywhere, but to import it takes longer than a start has
for the question: it is asked only where the system's own answer is missing."""

from __future__ import annotations

import os
from pathlib import Path

SIBLINGS = "cpu[0-9]*/topology/thread_siblings_list"
CPUS = Path("/sys/devices/system/cpu")


def ram_bytes() -> int:
    """Bytes of RAM."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        import psutil

        return int(psutil.virtual_memory().total)


def physical_cores() -> int:
    """Cores of all sockets, however many threads each runs side by side."""
    try:
        if siblings := {path.read_text() for path in CPUS.glob(SIBLINGS)}:
            return len(siblings)
    except OSError:
        pass
    import psutil

    return int(psutil.cpu_count(logical=False) or os.cpu_count() or 1)
