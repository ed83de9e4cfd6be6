"""The machine's RAM and cores. psutil knows them on every system, but importing it would slow down
every start, so it is used only if the system's own interface fails."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
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
    """Physical cores of all sockets, not hardware threads."""
    try:
        if siblings := {path.read_text() for path in CPUS.glob(SIBLINGS)}:
            return len(siblings)
    except OSError:
        pass
    import psutil

    return int(psutil.cpu_count(logical=False) or os.cpu_count() or 1)


def usable_cores() -> int:
    """Physical cores, or fewer if this process is restricted to some (containers, taskset)."""
    cores = physical_cores()
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    return max(1, cores)


def free_bytes(path: Path) -> int:
    """Free bytes on the disk that contains `path`, or will."""
    for folder in (path, *path.absolute().parents):
        if os.path.exists(folder):
            return shutil.disk_usage(folder).free
    return 0


def own_resident_bytes() -> int | None:
    """RAM of this process; None where the system tells it only slowly."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def resident_bytes(pid: int) -> int:
    """RAM of a process and of those that it started; 0 if it has ended."""
    import psutil

    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += int(each.memory_info().rss)
    return total
