"""The machine's RAM and cores. psutil knows them on every system, but importing it would slow down
every start, so it is used only if the system's own interface fails."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

SIBLINGS = "cpu[0-9]*/topology/thread_siblings_list"
CPUS = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")
CONTAINER_SHARE = 0.93
"""Beyond the limit of a control group, processes are killed."""
FORKED_S = 0.1
"""After this time a process that was forked runs a program of its own."""


def ram_bytes() -> int:
    """Bytes of RAM, or of what this process's container or unit may have of it."""
    installed = installed_bytes()
    return container_bytes() or installed


def installed_bytes() -> int:
    """Bytes of the machine's RAM."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        import psutil

        return int(psutil.virtual_memory().total)


def container_bytes() -> int:
    """Bytes of RAM that this process's container or unit may have, if that is less than the machine has; 0: all
    of it."""
    try:
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        return 0
    least = min(memory_limits(groups), default=0)
    return least if 0 < least < installed_bytes() else 0


def container_ram_max() -> int:
    """Bytes of RAM that towerd takes of those of its container or unit, in which pages of files count, too, and buffers
    of the system's; 0: no limit."""
    return int(CONTAINER_SHARE * container_bytes())


def memory_limits(groups: str, root: Path = CGROUPS) -> list[int]:
    """The limits, in bytes, of the control groups that a process is in and of those above them. groups: its
    `/proc/PID/cgroup`, whose paths inside a container may be those outside of it (cgroups(7))."""
    limits = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        names = ("memory.limit_in_bytes",) if controllers else ("memory.max", "memory.high")
        group = top / path.strip("/")
        for folder in (group, *(each for each in group.parents if each.is_relative_to(top))):
            for name in names:
                with suppress(OSError, ValueError):  # none here, or "max"
                    limits.append(int((folder / name).read_text()))
    return limits


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
    found = _statm("self")
    return None if found is None else found[1]


def own_address_bytes() -> int | None:
    """Address space of this process, used or not; None where the system does not tell."""
    found = _statm("self")
    return None if found is None else found[0]


def address_bytes_max() -> int:
    """What `ulimit -v` allows of it; 0: no limit."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    except (ImportError, AttributeError, OSError):
        return 0
    return 0 if soft == resource.RLIM_INFINITY else soft


def children_bytes() -> int:
    """RAM of the processes that this one has started, and of theirs."""
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError:  # macOS
        own = resident_bytes(os.getpid())
        return max(0, own - (_psutil_resident() or 0))
    total, pids = 0, [pid for task in tasks for pid in _children_of("self", task)]
    while pids:
        pid = pids.pop()
        found = _statm(pid) if _is_settled(pid) else None
        total += 0 if found is None else found[1]
        with suppress(OSError):
            pids += [
                each for task in os.listdir(f"/proc/{pid}/task") for each in _children_of(pid, task)
            ]
    return total


def _is_settled(pid: str) -> bool:
    """Whether a process is a program of its own: one that was forked just now has the pages of its parent, which
    would count twice."""
    try:
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return False
    return up_s - started / os.sysconf("SC_CLK_TCK") > FORKED_S


def _children_of(pid: str, task: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    except OSError:  # it has ended
        return []


def _psutil_resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _statm(pid: str) -> tuple[int, int] | None:
    """Bytes of address space and of RAM of a process."""
    try:
        said = Path(f"/proc/{pid}/statm").read_text().split()
        page = os.sysconf("SC_PAGE_SIZE")
        return int(said[0]) * page, int(said[1]) * page
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
