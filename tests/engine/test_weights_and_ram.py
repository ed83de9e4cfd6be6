"""Weights that do not fit a limit: one that was set refuses them, a container's own is given up with a warning."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from towerd.engine.embedded.context.ram_plan import check_weights
from towerd.errors import ConfigError
from towerd.settings.config import Config
from towerd.settings.lowered import warn_of_lowered
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


def test_caches_that_are_smaller_than_was_said(caplog: pytest.LogCaptureFixture) -> None:
    """What was set, and only that; recalled rows only where chats have any."""
    usual = Config(ram_max=16 * GIB)
    said = replace(usual, hot_bytes=3 * GIB, recall_bytes=2 * GIB)

    def less(config: Config) -> Config:
        return replace(config, hot_bytes=GIB // 4, recall_bytes=GIB // 8)

    with caplog.at_level(logging.WARNING):
        warn_of_lowered(usual, less(usual), "--ram-max 16,384 MiB")
        warn_of_lowered(said, said, "--ram-max 16,384 MiB")
        share = replace(usual, behind_router=True, hot_bytes=usual.hot_bytes - 1)
        warn_of_lowered(share, less(share), "--ram-max 16,384 MiB")
        assert not caplog.messages
        warn_of_lowered(said, less(said), "--ram-max 16,384 MiB")
        assert [each.split(":")[0] for each in caplog.messages] == [
            "--hot-bytes is 256 MiB instead of 3,072 MiB"
        ]
        caplog.clear()
        keeping = replace(said, retention="h2o", live_budget=512)
        warn_of_lowered(keeping, less(keeping), "--ram-max 16,384 MiB")
    assert [each.split(" ")[0] for each in caplog.messages] == ["--hot-bytes", "--recall-bytes"]
