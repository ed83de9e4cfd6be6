"""How long `towerd serve` takes until /health answers ok, with the bundled model:

    .venv/bin/python tests/support/start_time.py

Medians of ten starts, each on a store of its own: seconds, and CPU seconds of the process.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from daemon import Daemon

N_STARTS = 10


def start(root: Path) -> tuple[float, float]:
    """(seconds, CPU seconds) of one start."""
    daemon = Daemon(root, "-m", "stories")
    began = time.perf_counter()
    daemon.start()
    took = time.perf_counter() - began
    fields = Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()
    daemon.kill()
    return took, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        start(Path(folder) / "warm-up")  # which compiles what was never imported
        found = [start(Path(folder) / str(i)) for i in range(N_STARTS)]
    seconds, cpu = (statistics.median(column) for column in zip(*found, strict=True))
    load = os.getloadavg()[0]
    print(f"{seconds:.2f} s, {cpu:.2f} CPU seconds, load {load:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
