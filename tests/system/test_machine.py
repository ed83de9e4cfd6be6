"""What the system says of itself, against psutil."""

from __future__ import annotations

from pathlib import Path

import psutil

from towerd.system.machine import free_bytes, memory_limits, physical_cores, ram_bytes


def test_ram() -> None:
    own = Path("/proc/self/cgroup")
    limits = memory_limits(own.read_text()) if own.exists() else []
    assert ram_bytes() == min([psutil.virtual_memory().total, *limits])


def test_limits_of_a_container(tmp_path: Path) -> None:
    """The least one counts. A path from outside of the container is not there; its top is."""
    unit = tmp_path / "a.slice" / "b.service"
    unit.mkdir(parents=True)
    (unit / "memory.max").write_text("max\n")
    (unit.parent / "memory.max").write_text("4294967296\n")
    (tmp_path / "memory.max").write_text("8589934592\n")
    assert memory_limits("0::/a.slice/b.service\n", tmp_path) == [1 << 32, 1 << 33]
    assert memory_limits("0::/outside/of/it\n", tmp_path) == [1 << 33]
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1073741824\n")
    groups = "9:name=systemd:/\n8:pids:/x\n7:cpu,memory:/x\n"
    assert memory_limits(groups, tmp_path) == [1 << 30]
    assert memory_limits("", tmp_path) == []
    (tmp_path / "a.slice" / "memory.high").write_text(f"{1 << 31}\n")
    assert min(memory_limits("0::/a.slice/b.service\n", tmp_path)) == 1 << 31


def test_cores() -> None:
    assert physical_cores() == (psutil.cpu_count(logical=False) or psutil.cpu_count())


def test_free_bytes_below_a_name_that_no_disk_can_have(tmp_path: Path) -> None:
    """Paths come from settings: asking for them raises nothing."""
    assert free_bytes(tmp_path / ("x" * 300) / "store") > 0
