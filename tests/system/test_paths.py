"""Default places follow the XDG variables and never fall back to /tmp."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from towerd.system import paths

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="XDG directories are Linux's")


def test_xdg_variables_move_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert paths.store_dir() == tmp_path / "data" / "towerd" / "store"
    assert paths.models_dir() == tmp_path / "data" / "towerd" / "models"
    assert paths.config_file() == tmp_path / "config" / "towerd" / "towerd.toml"
    folder = tmp_path / "run" / "towerd"
    assert paths.runtime_socket(paths.store_dir()) == folder / "towerd.sock"


def test_each_store_has_a_socket_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its directory is written."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    here, there = (paths.runtime_socket(tmp_path / name) for name in "ab")
    usual = paths.runtime_socket(paths.store_dir())
    assert len({here, there, usual}) == 3
    assert len({path.parent for path in (here, there, usual)}) == 1
    monkeypatch.chdir(tmp_path)
    for same in (tmp_path / "link", Path("a"), tmp_path / "b" / ".." / "a"):
        assert paths.runtime_socket(same) == here


def test_without_a_runtime_directory_the_socket_is_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("os.access", lambda *_: False)
    assert paths.runtime_socket(paths.store_dir()) == tmp_path / "towerd" / "towerd.sock"
