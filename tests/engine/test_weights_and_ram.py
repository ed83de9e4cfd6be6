"""Weights that do not fit a limit: one that was set refuses them, a container's own is given up with a warning."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from towerd.engine.embedded.context.ram_plan import check_weights
from towerd.errors import ConfigError
from towerd.settings.config import Config
from towerd.system.ram_limit import RamLimit

GIB = 1 << 30


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    """A file of 40 GiB that takes nothing of the disk."""
    path = tmp_path / "huge.gguf"
    path.touch()
    os.truncate(path, 40 * GIB)
    return path


def test_a_limit_that_was_set(huge: Path) -> None:
    ram = RamLimit(16 * GIB, address_max=0)
    with pytest.raises(ConfigError, match="the weights take 40,960 MiB"):
        check_weights([huge], Config(gpu_layers=0, ram_max=16 * GIB), ram)
    check_weights([huge], Config(gpu_layers=0), RamLimit(64 * GIB, address_max=0))


def test_the_limit_of_a_container(huge: Path, caplog: pytest.LogCaptureFixture) -> None:
    ram = RamLimit(16 * GIB, address_max=0)
    with caplog.at_level(logging.WARNING):
        check_weights([huge], Config(gpu_layers=0), ram, may_exceed=True)
    assert not ram.is_limited
    assert "--ram-max" in caplog.text
