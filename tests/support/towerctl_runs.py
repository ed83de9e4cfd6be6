"""towerctl as a person calls it, and a real daemon to call."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from daemon import Daemon

from towerd import log
from towerd.cli.main import towerctl


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither the user's variables nor towerd.toml, socket or store."""
    for name in list(os.environ):
        if name.startswith("TOWERD_"):
            monkeypatch.delenv(name)
    folder = tmp_path_factory.mktemp("xdg")  # 0700: a runtime directory others can read is refused
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(folder))


@pytest.fixture
def server() -> Iterator[Daemon]:
    """A started daemon with the bundled model and an empty store. Not below pytest's own folder,
    which is too deep for a socket on some systems."""
    with tempfile.TemporaryDirectory(prefix="towerd-") as folder, Daemon(Path(folder)) as running:
        yield running


@pytest.fixture
def ctl() -> Iterator[Callable[..., Result]]:
    """Runs towerctl; asserts the exit code, and that there never is a traceback. The log is what it
    was for the tests that follow."""
    root = logging.getLogger(log.ROOT)
    before = root.handlers, root.level, root.propagate

    def run(*args: object, code: int = 0, input: str | None = None) -> Result:
        result = CliRunner().invoke(towerctl, [str(arg) for arg in args], input=input)
        assert "Traceback" not in result.output
        assert result.exception is None or isinstance(result.exception, SystemExit), result
        assert result.exit_code == code, result.output
        return result

    yield run
    root.handlers, root.level, root.propagate = before


@pytest.fixture
def ctl_json(ctl: Callable[..., Result]) -> Callable[..., Any]:
    """Runs towerctl with --json and gives the value it printed, which is all of stdout."""

    def run(*args: object, code: int = 0) -> Any:
        return json.loads(ctl(*args, "--json", code=code).stdout)

    return run
