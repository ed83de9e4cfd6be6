"""Freed rows leave the process, whatever was allocated between them."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this")

PROGRAM = """
import sys, psutil
from towerd.system.process import return_large_blocks
if sys.argv[1] == "set":
    return_large_blocks()
first = b"x" * (24 << 20)
del first
rows = [(b"x" * (8 << 20), bytes(100_000)) for _ in range(20)]
between = [small for _, small in rows]
del rows
print(psutil.Process().memory_info().rss)
"""


def test_freed_blocks_leave_the_process() -> None:
    """Of 160 MiB in blocks of 8, with something small behind each, nothing stays."""
    kept, returned = (_rss_after(how) for how in ("as is", "set"))
    assert kept - returned > 100 << 20


def _rss_after(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], check=True, capture_output=True, text=True
    )
    return int(done.stdout)
