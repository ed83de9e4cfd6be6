"""The resource use of servers under test, and servers of several models."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

from towerd.cli.bench.harness.servers import ServerProcess, llama_process, towerd_process


class Vitals(NamedTuple):
    """The resource use of a process at one moment."""

    rss_bytes: int
    fds: int
    threads: int


def vitals(server: ServerProcess) -> Vitals | None:
    """The resource use of the running process, without children; None if it has ended."""
    if (pid := server.pid) is None:
        return None
    process = psutil.Process(pid)
    with process.oneshot():
        rss_bytes = int(process.memory_info().rss)
        return Vitals(rss_bytes, int(process.num_fds()), int(process.num_threads()))


def cpu_s(server: ServerProcess) -> float:
    """CPU time of the running process so far, without children."""
    assert server.pid is not None
    times = psutil.Process(server.pid).cpu_times()
    return float(times.user + times.system)


def towerd_router(folder: Path, *flags: str) -> ServerProcess:
    """`towerd serve` of all models in `folder`/models, on a store beside them."""
    return towerd_process(
        "--models-dir", str(folder / "models"), store=folder / "store", flags=flags
    )


def llama_router(folder: Path, *flags: str) -> ServerProcess:
    """llama-server as a router of all models in `folder`/models."""
    return llama_process("--models-dir", str(folder / "models"), "--offline", *flags)
