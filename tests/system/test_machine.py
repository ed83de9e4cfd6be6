"""What the system says of itself, against psutil."""

from __future__ import annotations

import psutil

from towerd.system.machine import physical_cores, ram_bytes


def test_ram() -> None:
    assert ram_bytes() == psutil.virtual_memory().total


def test_cores() -> None:
    assert physical_cores() == (psutil.cpu_count(logical=False) or psutil.cpu_count())
