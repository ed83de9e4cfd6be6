"""What the system says of itself, against psutil."""

from __future__ import annotations

from pathlib import Path

import psutil

from towerd.system.machine import free_bytes, physical_cores, ram_bytes


def test_ram() -> None:
    assert ram_bytes() == psutil.virtual_memory().total


def test_cores() -> None:
    assert physical_cores() == (psutil.cpu_count(logical=False) or psutil.cpu_count())


def test_free_bytes_below_a_name_that_no_disk_can_have(tmp_path: Path) -> None:
    """Paths come from settings: asking for them raises nothing."""
    assert free_bytes(tmp_path / ("x" * 300) / "store") > 0
